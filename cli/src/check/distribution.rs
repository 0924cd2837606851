//! What the distributions call what Bulkhead needs, and how they install it.

use std::{fs, path::Path};

/// Distributions with the same package manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Debian, Ubuntu.
    Debian,
    /// Fedora, RHEL and those that are built from it.
    Fedora,
    Suse,
    Arch,
    Other,
}

/// What the names of `ID` and `ID_LIKE` belong to (os-release(5)).
const NAMES: [(&str, Family); 9] = [
    ("debian", Family::Debian),
    ("ubuntu", Family::Debian),
    ("fedora", Family::Fedora),
    ("rhel", Family::Fedora),
    ("centos", Family::Fedora),
    ("suse", Family::Suse),
    ("opensuse", Family::Suse),
    ("sles", Family::Suse),
    ("arch", Family::Arch),
];

impl Family {
    /// That of the host whose root directory is `root`.
    pub(crate) fn of(root: &Path) -> Self {
        // Where the system is an image, as Fedora CoreOS and openSUSE MicroOS, none of the commands works.
        let of_images =
            ["run/ostree-booted", "usr/sbin/transactional-update", "usr/bin/transactional-update"];
        if of_images.iter().any(|file| root.join(file).exists()) {
            return Self::Other;
        }
        // The first one takes precedence.
        let files = ["etc/os-release", "usr/lib/os-release"].map(|file| fs::read_to_string(root.join(file)));
        files.into_iter().flatten().next().map_or(Self::Other, |text| Self::in_text(&text))
    }

    fn in_text(text: &str) -> Self {
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            line.unwrap_or_default().trim().trim_matches(['"', '\''])
        };
        // The names in ID_LIKE begin with the closest one.
        let names = [value("ID")].into_iter().chain(value("ID_LIKE").split_whitespace());
        let known =
            |name: &str| NAMES.into_iter().find(|(known, _)| *known == name).map(|(_, family)| family);
        names.filter_map(known).next().unwrap_or(Self::Other)
    }

    /// How containerd is installed.
    pub(super) fn install_containerd(self) -> &'static str {
        match self {
            Self::Debian => "`apt-get install containerd`",
            Self::Fedora => {
                "`dnf install containerd`, or containerd.io of docker's repository where there is none"
            }
            Self::Suse => "`zypper install containerd`",
            Self::Arch => "`pacman -S containerd`",
            Self::Other => "the package containerd of this distribution, or a release of containerd",
        }
    }

    /// How the CNI plugins are installed. The distributions have them in other directories than upstream.
    pub(super) fn install_cni_plugins(self) -> &'static str {
        match self {
            Self::Debian => "`apt-get install containernetworking-plugins`",
            Self::Fedora => "`dnf install containernetworking-plugins`",
            Self::Suse => "`zypper install cni-plugins`",
            Self::Arch => "`pacman -S cni-plugins`",
            Self::Other => "the package of this distribution, or a release of containernetworking/plugins",
        }
    }

    /// How pasta is installed.
    pub(super) fn install_pasta(self) -> &'static str {
        match self {
            Self::Debian => "`apt-get install passt`",
            Self::Fedora => "`dnf install passt`",
            Self::Suse => "`zypper install passt`",
            Self::Arch => "`pacman -S passt`",
            Self::Other => "the package passt of this distribution",
        }
    }

    /// How the host gets all modules of its kernel. Kernels for clouds and containers lack some.
    pub(super) fn install_modules(self) -> &'static str {
        match self {
            Self::Debian => {
                "`apt-get install linux-image-amd64`, on Ubuntu `apt-get install linux-modules-extra-$(uname -r)`, and \
                 boot that kernel"
            }
            Self::Fedora => {
                "`dnf install kernel-modules-$(uname -r) kernel-modules-extra-$(uname -r)`, or update the kernel with \
                 both and boot it"
            }
            Self::Suse => {
                "`zypper install kernel-default` in place of kernel-default-base, and boot that kernel"
            }
            Self::Arch => {
                "`pacman -S linux`, and boot that kernel: an update removes the modules of the running one"
            }
            Self::Other => "install the package with all modules of this kernel",
        }
    }

    /// How a parameter is added to the command line of the kernel.
    pub(super) fn add_kernel_parameter(self, parameter: &str) -> String {
        let then = |update: &str| {
            format!(
                "add {parameter} to GRUB_CMDLINE_LINUX in /etc/default/grub, run `{update}`, and boot again"
            )
        };
        match self {
            Self::Debian => then("update-grub"),
            Self::Fedora => format!("run `grubby --update-kernel=ALL --args={parameter}`, and boot again"),
            Self::Suse => then("grub2-mkconfig -o /boot/grub2/grub.cfg"),
            Self::Arch => then("grub-mkconfig -o /boot/grub/grub.cfg"),
            Self::Other => format!("add {parameter} to the kernel command line, and boot again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_of_the_family_that_it_names_or_is_like() {
        for (text, family) in [
            ("PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\nVERSION_ID=\"13\"\nID=debian\n", Family::Debian),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", Family::Debian),
            ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", Family::Fedora),
            ("ID='fedora'\n", Family::Fedora),
            ("ID=\"opensuse-leap\"\nID_LIKE=\"suse opensuse\"\n", Family::Suse),
            ("ID=\"sles\"\n", Family::Suse),
            ("ID=manjaro\nID_LIKE=arch\n", Family::Arch),
            ("ID=alpine\n", Family::Other),
            ("VARIANT_ID=debian\nnonsense\n", Family::Other),
            ("", Family::Other),
        ] {
            assert_eq!(Family::in_text(text), family, "{text}");
        }
    }

    #[test]
    fn the_file_of_the_administrator_comes_before_that_of_the_vendor() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Family::of(dir.path()), Family::Other);
        for (directory, text, family) in
            [("usr/lib", "ID=arch\n", Family::Arch), ("etc", "ID=debian\n", Family::Debian)]
        {
            fs::create_dir_all(dir.path().join(directory)).unwrap();
            fs::write(dir.path().join(directory).join("os-release"), text).unwrap();
            assert_eq!(Family::of(dir.path()), family);
        }
    }

    #[test]
    fn no_family_is_told_to_run_a_command_of_another() {
        let managers = [
            (Family::Debian, "apt-get"),
            (Family::Fedora, "dnf"),
            (Family::Suse, "zypper"),
            (Family::Arch, "pacman"),
        ];
        for family in [Family::Debian, Family::Fedora, Family::Suse, Family::Arch, Family::Other] {
            for text in [
                family.install_containerd(),
                family.install_cni_plugins(),
                family.install_pasta(),
                family.install_modules(),
            ] {
                for (other, manager) in managers {
                    assert_eq!(text.contains(manager), family == other, "{family:?}: {text}");
                }
            }
            assert!(family.add_kernel_parameter("a=1").contains("a=1"));
        }
        assert!(Family::Debian.add_kernel_parameter("a=1").contains("`update-grub`"));
        assert!(Family::Fedora.add_kernel_parameter("a=1").contains("grubby --update-kernel=ALL --args=a=1"));
    }

    #[test]
    fn a_system_that_is_an_image_has_no_command_of_its_family() {
        for (system, file) in
            [("ID=fedora\n", "run/ostree-booted"), ("ID=sles\n", "usr/sbin/transactional-update")]
        {
            let dir = tempfile::tempdir().unwrap();
            for file in ["etc/os-release", file] {
                fs::create_dir_all(dir.path().join(file).parent().unwrap()).unwrap();
            }
            fs::write(dir.path().join("etc/os-release"), system).unwrap();
            assert_ne!(Family::of(dir.path()), Family::Other);
            fs::write(dir.path().join(file), "").unwrap();
            assert_eq!(Family::of(dir.path()), Family::Other);
        }
    }
}
