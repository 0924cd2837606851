//! Why KVM's state could not be saved or restored.

/// An error of KVM, or a value that KVM does not take, while the state of a VM is saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("KVM cannot save or restore a VM's {what}")]
    Kvm { what: &'static str, source: kvm_ioctls::Error },
    #[error("KVM rejects the value of a vCPU's MSR {index:#x}")]
    Msr { index: u32 },
    #[error("a vCPU has more {what} than KVM takes at once")]
    Many { what: &'static str },
}

pub(super) fn refused(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { what, source }
}
