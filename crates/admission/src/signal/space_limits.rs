//! The limits of the process on its addresses and its data, from `/proc/self/limits`.

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::{Statm, number};

/// The limits on mappings of the process; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SpaceLimits {
    /// Addresses of any kind (`RLIMIT_AS`).
    address: Option<ByteSize>,
    /// Private memory that can be written: heaps and stacks (`RLIMIT_DATA`).
    data: Option<ByteSize>,
}

impl SpaceLimits {
    /// Parses `/proc/self/limits`, whose first column of numbers holds the limits in force.
    pub(super) fn of(text: &[u8]) -> Self {
        let soft = |name: &[u8]| {
            let line =
                text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name))?;
            let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
            number(fields.next()?).map(ByteSize::new) // `unlimited` is no number
        };
        Self { address: soft(b"Max address space"), data: soft(b"Max data size") }
    }

    /// Returns each limit in force with its name and what counts against it. An allocator may reuse
    /// addresses that it kept, but not for every size, so they count as used.
    pub(super) fn each(self, held: Statm) -> impl Iterator<Item = (&'static str, [ByteSize; 2])> {
        let address = self.address.map(|limit| ("RLIMIT_AS", [limit, held.mapped]));
        let data = held.data.max(held.anon);
        address.into_iter().chain(self.data.map(move |limit| ("RLIMIT_DATA", [limit, data])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_on_addresses_and_data_are_compared_with_what_is_mapped() {
        let limits = |address: &str, data: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max cpu time              unlimited            unlimited            seconds   \n\
                 Max data size             {data}            unlimited            bytes     \n\
                 Max address space         {address}            9            bytes     \n"
            );
            SpaceLimits::of(text.as_bytes())
        };
        // 4 MiB are mapped, 3 of them data.
        let held = Statm::parse(b"1024 512 256 5 0 768 0\n", ByteSize::kib(4)).expect("read");
        let each = |address, data| limits(address, data).each(held).collect::<Vec<_>>();
        assert_eq!(each("unlimited", "unlimited"), []);
        let address = ("RLIMIT_AS", [ByteSize::mib(8), ByteSize::mib(4)]);
        let data = ("RLIMIT_DATA", [ByteSize::mib(4), ByteSize::mib(3)]);
        assert_eq!(each("8388608", "unlimited"), [address]);
        assert_eq!(each("8388608", "4194304"), [address, data]);
        assert_eq!(SpaceLimits::of(b""), SpaceLimits::default());
    }
}
