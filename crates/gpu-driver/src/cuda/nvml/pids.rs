//! The process identifiers under which NVML may list this process.
//!
//! A driver whose kernel module knows PID namespaces lists processes by their number in the
//! caller's namespace, and leaves out those that are not visible there. Older drivers list numbers
//! of the host. In the host's own namespace both are the same. In a container a number of the host
//! may by chance be that of another process in the container, so no process is matched, or named
//! from `/proc`, unless it is certain whose number it is.
//!
//! Invariant: [`Owned::Unknown`] unless the listed numbers are those of this process's `/proc`.

/// The inode of the first PID namespace: `PROC_PID_INIT_INO` of Linux.
const HOST_NAMESPACE: &str = "pid:[4026531836]";

/// The numbers of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnPids {
    /// The number in the process's own namespace.
    inner: u32,
    /// The number in the namespace of the mounted `/proc`, if that is another one.
    outer: Option<u32>,
    /// `true` if the process is in the host's namespace.
    is_on_host: bool,
}

/// The entry of this process in a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    /// The listed numbers are those of `/proc`, and this process has this one; `None` if it is not
    /// listed.
    Known(Option<u32>),
    /// The listed numbers may be of another namespace.
    Unknown,
}

impl OwnPids {
    /// Reads the numbers of this process.
    pub(super) fn read() -> Self {
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let namespace = namespace.as_ref().and_then(|link| link.to_str());
        Self::of(std::process::id(), &status, namespace)
    }

    fn of(inner: u32, status: &str, namespace: Option<&str>) -> Self {
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let mut numbers = line.into_iter().flat_map(str::split_ascii_whitespace);
        let first = numbers.next().and_then(|number| number.parse().ok());
        let outer = first.filter(|_| numbers.next().is_some());
        Self { inner, outer, is_on_host: namespace == Some(HOST_NAMESPACE) }
    }

    /// Finds this process in a list. `is_visible` tells whether `/proc` has a process with this
    /// number.
    pub(super) fn find(&self, listed: &[u32], is_visible: impl Fn(u32) -> bool) -> Owned {
        let has = |pid: u32| Some(pid).filter(|pid| listed.contains(pid));
        if self.is_on_host {
            return Owned::Known(has(self.inner));
        }
        // The host's `/proc` in a container: its numbers are those of the host.
        if let Some(outer) = self.outer {
            return has(outer).map_or(Owned::Unknown, |pid| Owned::Known(Some(pid)));
        }
        // A driver that lists numbers of this namespace lists only visible processes.
        match has(self.inner) {
            Some(pid) if listed.iter().all(|&pid| is_visible(pid)) => Owned::Known(Some(pid)),
            _ => Owned::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSIDE: Option<&str> = Some("pid:[4026532841]");

    fn all(_: u32) -> bool {
        true
    }

    #[test]
    fn on_the_host_a_process_is_listed_under_its_number_or_not_at_all() {
        let own = OwnPids::of(77, "Name:\tx\nNSpid:\t77\n", Some(HOST_NAMESPACE));
        assert_eq!(own.find(&[5, 77], |_| false), Owned::Known(Some(77)));
        assert_eq!(own.find(&[5, 78], all), Owned::Known(None));
        assert_eq!(own.find(&[], all), Owned::Known(None));
    }

    #[test]
    fn in_a_container_it_is_known_only_if_each_listed_process_is_visible() {
        let own = OwnPids::of(7, "NSpid:\t7\n", INSIDE);
        assert_eq!(own.find(&[7, 12], all), Owned::Known(Some(7)));
        assert_eq!(own.find(&[7, 1_012], |pid| pid < 100), Owned::Unknown, "host numbers");
        assert_eq!(own.find(&[1_012], all), Owned::Unknown, "another process of the host");
        assert_eq!(own.find(&[], all), Owned::Unknown);
    }

    #[test]
    fn with_the_hosts_proc_its_number_there_is_the_one_that_is_listed() {
        let own = OwnPids::of(7, "NSpid:\t4711\t30\t7\n", INSIDE);
        assert_eq!(own.find(&[7, 4711], all), Owned::Known(Some(4711)));
        assert_eq!(own.find(&[7], all), Owned::Unknown, "7 is another process there");
    }

    #[test]
    fn without_proc_nothing_is_claimed_that_could_be_wrong() {
        for (status, namespace) in [("", None), ("NSpid:\t\n", INSIDE), ("NSpid:\tx\n", INSIDE)] {
            let own = OwnPids::of(7, status, namespace);
            assert_eq!(own, OwnPids { inner: 7, outer: None, is_on_host: false });
            assert_eq!(own.find(&[7, 8], |_| false), Owned::Unknown);
        }
        let own = OwnPids::read();
        assert_eq!(own.inner, std::process::id());
    }
}
