//! The processes on each device, as NVML lists them.
//!
//! Only [`MemoryDevices::processes`] queries NVML, which may be slow, and hang if a device fails
//! ([`SlowValue`](crate::memory::slow_value::SlowValue)).

use crate::memory::devices::MemoryDevices;
use crate::memory::error::Diagnostic;

use super::device::Device;
use super::process_lists::DeviceProcesses;

impl MemoryDevices<'_> {
    /// Returns the processes that use each CUDA device of this `Memory`, as NVML lists them.
    /// Returns an empty list without CUDA devices, and in a forked child.
    ///
    /// NVML (`libnvidia-ml.so.1`) is loaded by the first call, and stays loaded. If it cannot be
    /// loaded, a diagnostic reports it once, and the lists contain the error. A list is kept for 5
    /// s, so calls in between cost little. Other calls start a thread for the query and wait for it
    /// for at most 50 ms; if NVML takes longer, they return the last list, or an error, and a later
    /// call returns the answer. It has not run on a real GPU.
    #[must_use]
    pub fn processes(&self) -> Vec<DeviceProcesses> {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return Vec::new();
        }
        let devices = &shared.devices;
        let committed = |device: &Device| shared.committed_on(device);
        let (lists, failure) = devices.processes.read(&*shared.clock, &devices.list, committed);
        if let Some(error) = failure {
            let start = "the processes on the device are unknown: ";
            let text = format!("{start}{error}");
            shared.add_diagnostic_once(start, Diagnostic::info("device", text));
        }
        lists
    }
}
