//! The sharing of memory: a union-find forest with one tree per piece of memory.
//!
//! It knows numbers and distances, but no sizes and no times. Paths are halved on each walk while
//! the forest is built.
//!
//! Invariant: following `over` from any buffer ends at a root, whose distance is the sum of those
//! on the way.

/// The forest of shared memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Unions {
    links: Vec<Link>,
}

/// One buffer's place in the forest.
#[derive(Clone, Copy, Debug)]
struct Link {
    /// The buffer whose memory it shares; itself if none.
    over: u32,
    /// `true` if it overwrites that buffer, `false` if it is a view of it.
    replaces: bool,
    /// A buffer nearer to the root, and the distance from its start.
    up: u32,
    at: u64,
}

impl Unions {
    /// Adds a buffer that shares no memory.
    pub(super) fn add(&mut self) {
        // More than 2^32 are refused before they come here.
        let own = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.push(Link { over: own, replaces: false, up: own, at: 0 });
    }

    /// Joins a root to another buffer; `false` if it is not a root, or the buffer is in its own
    /// tree.
    pub(super) fn join(&mut self, child: u32, over: u32, at: u64, replaces: bool) -> bool {
        let root = self.root_halving(over);
        if self.links[child as usize].over != child || root == child {
            return false;
        }
        self.links[child as usize] = Link { over, replaces, up: over, at };
        true
    }

    fn root_halving(&mut self, of: u32) -> u32 {
        let mut node = of as usize;
        loop {
            let link = self.links[node];
            let up = self.links[link.up as usize];
            if up.up == link.up {
                return link.up;
            }
            self.links[node] = Link { up: up.up, at: link.at + up.at, ..link };
            node = up.up as usize;
        }
    }

    /// The buffer whose memory this one shares in the end, and how far beyond its start.
    pub(super) fn root(&self, of: u32) -> (u32, u64) {
        let (mut node, mut at) = (of, 0);
        loop {
            let link = self.links[node as usize];
            if link.up == node {
                return (node, at);
            }
            (node, at) = (link.up, at + link.at);
        }
    }

    /// Whom it was said to lie over.
    pub(super) fn over(&self, of: u32) -> Option<u32> {
        let over = self.links[of as usize].over;
        (over != of).then_some(over)
    }

    /// Returns `true` if it overwrites the buffer whose memory it shares.
    pub(super) fn replaces(&self, of: u32) -> bool {
        self.links[of as usize].replaces
    }

    /// Returns `true` if no memory is shared.
    pub(super) fn is_trivial(&self) -> bool {
        self.links.iter().zip(0..).all(|(link, own)| link.over == own)
    }
}
