//! The metrics in Prometheus's text format, version 0.0.4. Their names are an interface: dashboards and alerts use
//! them.

use std::{
    collections::BTreeMap,
    fmt::{Display, Write},
};

use bulkhead_host_shim::operator::{COMMIT, Node, PodState, Pressure, Sample, TemplateState, VERSION};

/// What a client is told that the text is.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The names and values of labels, in the order in which they are printed.
type Labels = Vec<(&'static str, String)>;

/// Everything that is known of the host.
pub(super) fn text(node: &Node) -> String {
    let mut all = Exposition::default();
    all.node(node);
    all.starts(&node.pods);
    all.pods(&node.pods);
    all.text
}

#[derive(Default)]
struct Exposition {
    text: String,
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

/// The labels that all metrics of a pod have.
fn of(sample: &Sample) -> Labels {
    let pod = &sample.pod;
    vec![
        ("containerd", pod.containerd.clone()),
        ("namespace", pod.namespace.clone()),
        ("pod", pod.id.clone()),
    ]
}

fn of_with(sample: &Sample, name: &'static str, value: &str) -> Labels {
    let mut labels = of(sample);
    labels.push((name, value.to_owned()));
    labels
}

/// One number of each pod. None: it is not known, and there is no value.
struct Each {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    number: fn(&Sample) -> Option<u64>,
}

const EACH: [Each; 24] = [
    Each {
        name: "bulkhead_pod_up",
        help: "Whether the shim of the pod lives and its VMM answers. If that is not known, as while the pod starts, \
               there is no value.",
        kind: Kind::Gauge,
        number: |sample| sample.is_up.map(u64::from),
    },
    Each {
        name: "bulkhead_pod_problems",
        help: "Warnings of `bulkhead ps` about the pod.",
        kind: Kind::Gauge,
        number: |sample| Some(sample.pod.problems.len() as u64),
    },
    Each {
        name: "bulkhead_pod_containers",
        help: "Containers that exist in the pod.",
        kind: Kind::Gauge,
        number: |sample| {
            let is_known = sample.pod.state != PodState::Unknown;
            is_known.then_some(sample.pod.containers.len() as u64)
        },
    },
    Each {
        name: "bulkhead_pod_vcpus",
        help: "vCPUs of the VM, some of which may be offline.",
        kind: Kind::Gauge,
        number: |sample| sample.pod.vcpus.map(u64::from),
    },
    Each {
        name: "bulkhead_pod_memory_bytes",
        help: "Memory of the VMM and its guest on the host, with a share of the pages that several pods use.",
        kind: Kind::Gauge,
        number: |sample| sample.pod.memory_bytes,
    },
    Each {
        name: "bulkhead_pod_cgroup_memory_bytes",
        help: "Memory that is charged to the cgroup of the pod on the host.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.cgroup.memory_bytes,
    },
    Each {
        name: "bulkhead_pod_cgroup_memory_limit_bytes",
        help: "Limit of the memory of the cgroup of the pod on the host.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.cgroup.memory_limit_bytes,
    },
    Each {
        name: "bulkhead_pod_cgroup_oom_kills_total",
        help: "Processes of the cgroup of the pod that the host has killed because memory was short.",
        kind: Kind::Counter,
        number: |sample| sample.usage.cgroup.oom_kills,
    },
    Each {
        name: "bulkhead_pod_oom_kills_total",
        help: "Processes of the containers that the kernel of the guest has killed because memory was short.",
        kind: Kind::Counter,
        number: |sample| sample.container_oom_kills,
    },
    Each {
        name: "bulkhead_pod_vmm_threads",
        help: "Threads of the VMM.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.threads.map(|threads| threads as u64),
    },
    Each {
        name: "bulkhead_pod_vmm_open_files",
        help: "Open files of the VMM.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.open_files.map(|files| files as u64),
    },
    Each {
        name: "bulkhead_pod_kvm_exits_total",
        help: "Exits of the vCPUs from the guest to KVM.",
        kind: Kind::Counter,
        number: |sample| sample.usage.kvm_exits,
    },
    Each {
        name: "bulkhead_pod_network_receive_bytes_total",
        help: "Bytes that the guest has received.",
        kind: Kind::Counter,
        number: |sample| sample.usage.network.map(|network| network.received_bytes),
    },
    Each {
        name: "bulkhead_pod_network_transmit_bytes_total",
        help: "Bytes that the guest has sent.",
        kind: Kind::Counter,
        number: |sample| sample.usage.network.map(|network| network.sent_bytes),
    },
    Each {
        name: "bulkhead_pod_network_receive_packets_total",
        help: "Packets that the guest has received.",
        kind: Kind::Counter,
        number: |sample| sample.usage.network.map(|network| network.received_packets),
    },
    Each {
        name: "bulkhead_pod_network_transmit_packets_total",
        help: "Packets that the guest has sent.",
        kind: Kind::Counter,
        number: |sample| sample.usage.network.map(|network| network.sent_packets),
    },
    Each {
        name: "bulkhead_pod_balloon_bytes",
        help: "Memory of the guest that its balloon has taken away.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.devices.balloon_bytes,
    },
    Each {
        name: "bulkhead_pod_free_page_reported_bytes_total",
        help: "Memory that the guest has reported as free, and that went back to the host.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.reported_bytes,
    },
    Each {
        name: "bulkhead_pod_plugged_memory_bytes",
        help: "Memory that the guest has plugged, beside the memory that it began with.",
        kind: Kind::Gauge,
        number: |sample| sample.usage.devices.plugged_bytes,
    },
    Each {
        name: "bulkhead_pod_block_requests_total",
        help: "Requests of the guest to its block devices.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.block.map(|block| block.requests),
    },
    Each {
        name: "bulkhead_pod_block_read_bytes_total",
        help: "Bytes that the guest has read from its block devices.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.block.map(|block| block.read_bytes),
    },
    Each {
        name: "bulkhead_pod_block_written_bytes_total",
        help: "Bytes that the guest has written to its block devices.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.block.map(|block| block.written_bytes),
    },
    Each {
        name: "bulkhead_pod_vsock_receive_bytes_total",
        help: "Payload that the guest has received from the shim: requests, and standard input.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.vsock_received_bytes,
    },
    Each {
        name: "bulkhead_pod_vsock_transmit_bytes_total",
        help: "Payload that the guest has sent to the shim: answers, and standard output.",
        kind: Kind::Counter,
        number: |sample| sample.usage.devices.vsock_sent_bytes,
    },
];

impl Exposition {
    fn node(&mut self, node: &Node) {
        let build = vec![("version", VERSION.to_owned()), ("commit", COMMIT.to_owned())];
        self.gauge(
            "bulkhead_build_info",
            "The version of Bulkhead, and the commit of its source.",
            [(build, 1)],
        );
        let states = [
            (PodState::Running, "running"),
            (PodState::Crashed, "crashed"),
            (PodState::Leftover, "leftover"),
            (PodState::Unknown, "unknown"),
        ];
        let pods = states.map(|(state, name)| {
            let count = node.pods.iter().filter(|sample| sample.pod.state == state).count();
            (vec![("state", name.to_owned())], count)
        });
        self.gauge("bulkhead_pods", "Pods that have a state directory.", pods);
        let help = "Pods that were not looked at, because there are too many.";
        self.gauge("bulkhead_pods_left_out", help, [(Labels::new(), node.left_out)]);
        let failures = node.failures.iter().flatten();
        let failures = failures.map(|(cause, count)| (vec![("cause", cause.name().to_owned())], count));
        let help = "How often pods and containers could not be created or started, since the host has started. With \
                    the cause template only, the pod has started: its VM has booted.";
        self.metric("bulkhead_failures_total", help, Kind::Counter, failures);
        // They could not be looked at in time, and are not known.
        let Some(templates) = &node.templates else { return };
        let states = [
            (TemplateState::Complete, "complete"),
            (TemplateState::Outdated, "outdated"),
            (TemplateState::Unfinished, "unfinished"),
        ];
        let counts = states.map(|(state, name)| {
            let count = templates.iter().filter(|template| template.state == state).count();
            (vec![("state", name.to_owned())], count)
        });
        self.gauge("bulkhead_templates", "Saved VMs, of which the VMs of pods are clones.", counts);
        let bytes = templates.iter().fold(0, |sum: u64, template| sum.saturating_add(template.bytes));
        let help = "What the templates take in /run.";
        self.gauge("bulkhead_templates_size_bytes", help, [(Labels::new(), bytes)]);
        let clones: usize = templates.iter().map(|template| template.clones).sum();
        self.gauge("bulkhead_template_clones", "Pods that are clones.", [(Labels::new(), clones)]);
    }

    fn starts(&mut self, pods: &[Sample]) {
        let started = || pods.iter().filter_map(|sample| Some((sample, sample.start.as_ref()?)));
        let seconds = |micros: u64| micros as f64 / 1e6;
        let phases = started().flat_map(|(sample, start)| {
            let of_phase = |step: &str| of_with(sample, "phase", step);
            start.phases.iter().map(move |phase| (of_phase(phase.step.name()), seconds(phase.duration_us)))
        });
        let help =
            "How long a phase of the start of the pod took. The phases create and start contain the others.";
        self.gauge("bulkhead_pod_start_seconds", help, phases);
        let begun = started().map(|(sample, start)| (of(sample), seconds(start.began_unix_us)));
        let help = "When the pod was created, in seconds since 1970.";
        self.gauge("bulkhead_pod_created_timestamp_seconds", help, begun);
        let origins = started().map(|(sample, start)| (of_with(sample, "vm", start.vm.name()), 1));
        let help = "Whether the VM of the pod is a clone of a template, or has booted.";
        self.gauge("bulkhead_pod_vm_info", help, origins);
    }

    fn pods(&mut self, pods: &[Sample]) {
        for Each { name, help, kind, number } in EACH {
            let values = pods.iter().filter_map(|sample| Some((of(sample), number(sample)?)));
            self.metric(name, help, kind, values);
        }
        let requests = pods.iter().flat_map(|sample| {
            let of_device = |device: &str| of_with(sample, "device", device);
            sample.usage.file_requests.iter().map(move |(device, count)| (of_device(device), *count))
        });
        let help = "Requests of the guest for files of the host.";
        self.metric("bulkhead_pod_file_requests_total", help, Kind::Counter, requests);
        let times = pods.iter().filter_map(|sample| Some((sample, sample.usage.cpu?)));
        let times = times.flat_map(|(sample, cpu)| {
            [("vcpu", cpu.vcpu), ("fs", cpu.fs), ("other", cpu.other)]
                .map(|(name, seconds)| (of_with(sample, "thread", name), seconds))
        });
        let help = "Processor time of the threads of the VMM.";
        self.metric("bulkhead_pod_cpu_seconds_total", help, Kind::Counter, times);
        let times = pods.iter().filter_map(|sample| Some((of(sample), sample.usage.cgroup.cpu_seconds?)));
        let help = "Processor time that is charged to the cgroup of the pod on the host.";
        self.metric("bulkhead_pod_cgroup_cpu_seconds_total", help, Kind::Counter, times);
        self.pressure(pods);
    }

    /// How long the pods lacked something. There is no value if the host does not say it.
    fn pressure(&mut self, pods: &[Sample]) {
        let of_resources = |seconds: fn(&Pressure) -> Option<f64>| {
            let resources = pods.iter().flat_map(|sample| {
                let cgroup = &sample.usage.cgroup;
                let pressures = [
                    ("cpu", cgroup.cpu_pressure),
                    ("memory", cgroup.memory_pressure),
                    ("io", cgroup.io_pressure),
                ];
                pressures.map(|(resource, pressure)| (sample, resource, pressure))
            });
            resources.filter_map(move |(sample, resource, pressure)| {
                Some((of_with(sample, "resource", resource), seconds(&pressure)?))
            })
        };
        let help = "How long a thread of the cgroup of the pod on the host has waited for a resource that was short.";
        let times = of_resources(|pressure| pressure.waiting_seconds);
        self.metric("bulkhead_pod_cgroup_pressure_waiting_seconds_total", help, Kind::Counter, times);
        let help =
            "How long all busy threads of the cgroup of the pod on the host have waited for such a resource.";
        let times = of_resources(|pressure| pressure.stalled_seconds);
        self.metric("bulkhead_pod_cgroup_pressure_stalled_seconds_total", help, Kind::Counter, times);
    }

    fn gauge<V: Display>(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, V)>) {
        self.metric(name, help, Kind::Gauge, values);
    }

    /// Adds a metric, unless it has no value.
    fn metric<V: Display>(
        &mut self,
        name: &str,
        help: &str,
        kind: Kind,
        values: impl IntoIterator<Item = (Labels, V)>,
    ) {
        // Prometheus refuses the whole text if two values have the same labels. Names of pods that differ in control
        // characters only would cause that.
        let mut series = BTreeMap::new();
        for (labels, value) in values {
            series.entry(labels).or_insert(value);
        }
        if series.is_empty() {
            return;
        }
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        let text = &mut self.text;
        // A string takes everything.
        _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in series {
            text.push_str(name);
            for (index, (label, value)) in labels.iter().enumerate() {
                let before = if index == 0 { '{' } else { ',' };
                _ = write!(text, "{before}{label}=\"{}\"", escaped(value));
            }
            let end = if labels.is_empty() { "" } else { "}" };
            _ = writeln!(text, "{end} {value}");
        }
    }
}

/// The value of a label, as the format has it.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

#[cfg(test)]
mod tests;
