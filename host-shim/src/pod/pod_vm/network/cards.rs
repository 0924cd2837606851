//! The network cards of a guest: which interface of the host each is, and what the guest has of it.

use std::{net::IpAddr, os::fd::OwnedFd};

use bulkhead_agent_api::agent::{ChangeNetworkRequest, ConfigureNetworkRequest};
use tokio::task::AbortHandle;

use super::changes::{FailedChange, add_possible, change, from_sources, local_addresses, lost};
use crate::{
    host::network::{CardNumber, Parameters, Routing, Scan, name_server::NameServer},
    pod::pod_vm::host_reads::HostReads,
};

/// The network of a pod that has one.
#[derive(Debug)]
pub(in crate::pod::pod_vm) struct Network {
    /// A container that is in the pod's network namespace as long as the pod exists.
    pub(super) container: String,
    /// By their numbers.
    pub(super) cards: Vec<Card>,
    /// What the guest has of rules. After a change that failed: all that it may have.
    pub(super) routing: Routing,
    /// Whether it has all of these.
    pub(super) is_routing_known: bool,
    /// The kernel parameters that the namespace had at the first scan.
    pub(super) parameters: Parameters,
    /// Ends with the VM, or when it is dropped.
    pub(super) name_server: Option<NameServer>,
    pub(super) follows: Option<Follows>,
    pub(super) scans: HostReads,
}

/// A network card of the guest.
#[derive(Debug)]
pub(super) enum Card {
    Free,
    /// An interface of the host.
    Used {
        index: u32,
        /// What the guest has of it.
        description: Box<ConfigureNetworkRequest>,
        /// Set if a change has failed since. The description is then everything that the guest may have.
        failed: Option<FailedChange>,
        /// Addresses that the guest has lost since it has got the routes of this interface which have them as their
        /// source. If it has got them back, it needs these routes again.
        lost: Vec<IpAddr>,
        /// As long as it exists, the interface passes on packets to all multicast groups.
        _multicast: Option<OwnedFd>,
    },
    /// It is not known where the card is in the guest, or whether the guest has it, because something failed.
    Lost {
        /// The interface of the host with which it may be connected.
        index: Option<u32>,
    },
}

/// The task that follows the host, until this is dropped.
#[derive(Debug)]
pub(super) struct Follows(pub(super) AbortHandle);

impl Drop for Follows {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Network {
    pub(super) fn new(container: &str) -> Self {
        Self {
            container: container.into(),
            parameters: Parameters::default(),
            cards: vec![Card::Free],
            routing: Routing::default(),
            is_routing_known: true,
            name_server: None,
            follows: None,
            scans: HostReads::default(),
        }
    }

    /// The cards that are interfaces.
    pub(super) fn used(&self) -> impl Iterator<Item = (CardNumber, u32, &ConfigureNetworkRequest)> {
        (0..).zip(&self.cards).filter_map(|(number, card)| match card {
            Card::Used { index, description, .. } => Some((CardNumber(number), *index, &**description)),
            Card::Free | Card::Lost { .. } => None,
        })
    }

    pub(super) fn set(&mut self, number: CardNumber, card: Card) {
        if let Some(place) = self.cards.get_mut(usize::from(number.0)) {
            *place = card;
        }
    }

    /// The cards whose interfaces are not there any more, or have become others.
    pub(super) fn vanished(&self, scan: &Scan) -> Vec<(CardNumber, u32)> {
        let is_there = |index: u32, description: &ConfigureNetworkRequest| {
            let found = scan.interfaces.iter().find(|found| found.index == index);
            found.is_some_and(|found| match &found.described {
                Ok(now) => (&now.name, &now.mac) == (&description.name, &description.mac),
                Err(_) => found.name == description.name,
            })
        };
        let gone = self.used().filter(|(_, index, description)| !is_there(*index, description));
        gone.map(|(number, index, _)| (number, index)).collect()
    }

    /// The guest may lose these addresses, for ever or until they are added again.
    pub(super) fn lose(&mut self, addresses: &[IpAddr]) {
        for card in &mut self.cards {
            if let Card::Used { description, lost, .. } = card {
                let is_new = |ip: &&IpAddr| {
                    !lost.contains(*ip) && !from_sources(&description.routes, &[**ip]).is_empty()
                };
                let new: Vec<_> = addresses.iter().filter(is_new).copied().collect();
                lost.extend(new);
            }
        }
    }

    /// What the guest has to do again because of addresses that it had lost, for each card. It may lack all of this
    /// until [`Self::end_renewal`] is called.
    pub(super) fn renewals(&self) -> Vec<(CardNumber, ChangeNetworkRequest)> {
        let renewal = |(number, card): (u8, &Card)| match card {
            Card::Used { description, failed: None, lost, .. } if !lost.is_empty() => {
                Some((CardNumber(number), change(description, None, description, lost)))
            }
            _ => None,
        };
        (0..).zip(&self.cards).filter_map(renewal).collect()
    }

    pub(super) fn end_renewal(&mut self, number: CardNumber) {
        if let Some(Card::Used { lost, .. }) = self.cards.get_mut(usize::from(number.0)) {
            lost.clear();
        }
    }

    /// What the guest has to change if the interface of a card is `now`. Until [`Self::end_change`] is called, the
    /// change counts as one that failed.
    pub(super) fn begin_change(
        &mut self,
        index: u32,
        now: &ConfigureNetworkRequest,
    ) -> Option<(CardNumber, ChangeNetworkRequest)> {
        let place = self
            .cards
            .iter()
            .position(|card| matches!(card, Card::Used { index: of, .. } if *of == index))?;
        if let Some(Card::Used { description, .. }) = self.cards.get(place) {
            let lost = lost(description, now);
            self.lose(&lost);
        }
        let number = CardNumber(u8::try_from(place).ok()?);
        let Some(Card::Used { description, failed, lost, .. }) = self.cards.get_mut(place) else {
            return None;
        };
        if failed.is_none() && **description == *now {
            return None;
        }
        // The guest may not have the addresses of other interfaces yet.
        let own = local_addresses(&now.addresses);
        let lost: Vec<_> = lost.iter().filter(|ip| own.contains(ip)).copied().collect();
        let change = change(description, *failed, now, &lost);
        *failed = Some(FailedChange { switched_ipv6: change.switches_ipv6 });
        add_possible(description, now);
        Some((number, change))
    }

    /// What was begun has succeeded.
    pub(super) fn end_change(&mut self, number: CardNumber, now: ConfigureNetworkRequest) {
        if let Some(Card::Used { description, failed, lost, .. }) = self.cards.get_mut(usize::from(number.0))
        {
            let own = local_addresses(&now.addresses);
            lost.retain(|ip| !own.contains(ip) && !from_sources(&now.routes, &[*ip]).is_empty());
            (**description, *failed) = (now, None);
        }
    }

    /// Cards whose place in the guest is not known, and the interfaces with which they may be connected.
    pub(super) fn lost(&self) -> Vec<(CardNumber, Option<u32>)> {
        let lost = (0..).zip(&self.cards).filter_map(|(number, card)| match card {
            // It may be connected with another card since.
            Card::Lost { index } => Some((CardNumber(number), index.filter(|index| !self.has(*index)))),
            Card::Free | Card::Used { .. } => None,
        });
        lost.collect()
    }

    /// The permanent neighbours that the guest has, by the interface of the host.
    pub(super) fn neighbours(&self) -> impl Iterator<Item = (u32, IpAddr)> {
        let of = |(_, index, description): (_, u32, &ConfigureNetworkRequest)| {
            let addresses = description.neighbours.iter().filter_map(|neighbour| neighbour.what.parse().ok());
            addresses.map(move |ip| (index, ip)).collect::<Vec<_>>()
        };
        self.used().flat_map(of)
    }

    pub(super) fn has(&self, index: u32) -> bool {
        self.used().any(|(_, used, _)| used == index)
    }
}
