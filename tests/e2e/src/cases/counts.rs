//! What a unit of work costs in requests, exits, interrupts, packets and copied bytes.

use super::Case;
use crate::counts;

pub(super) const CASES: &[Case] = &[Case::bulkhead("no_row_costs_a_fifth_more_than_before", counts::compare)];
