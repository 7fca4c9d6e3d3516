//! Graphs: what comes of them is run, byte by byte, in memory that is as large as the plan says.
//!
//! The run knows values and their places, and nothing of lifetimes: each node reads its operands
//! and writes its result byte by byte, in one direction or the other, and finds each byte of an
//! operand as it was written, or the plan is wrong.
//!
//! Invariant: a run without a fault is one whose results are those of memory without limits.

use std::time::Duration;

use lowtide_planner::ByteSize;
use lowtide_planner::clock::ManualClock;
use lowtide_planner::{BufferId, Graph, Plan, Planner, Problem};

use super::plans::{planned, planned_for};
use super::random::Random;

/// A graph, and what it is made of.
#[derive(Default)]
struct Model {
    graph: Graph,
    values: Vec<Value>,
}

struct Value {
    id: BufferId,
    size: u64,
    kind: usize,
    /// The index of the value in whose memory it lies.
    root: usize,
    /// The operands of a node.
    reads: Option<Vec<usize>>,
    is_input: bool,
    is_external: bool,
    is_kept: bool,
}

impl Model {
    fn push(&mut self, id: BufferId, size: u64, root: Option<usize>) -> usize {
        let own = self.values.len();
        let root = root.unwrap_or(own);
        let kind = self.values.get(root).map_or(0, |value| value.kind);
        let (reads, is_input, is_external, is_kept) = (None, false, false, false);
        self.values.push(Value { id, size, kind, root, reads, is_input, is_external, is_kept });
        own
    }

    fn input(&mut self, size: u64) -> usize {
        let id = self.graph.input(format!("v{}", self.values.len()), ByteSize::new(size));
        let own = self.push(id, size, None);
        self.values[own].is_input = true;
        own
    }

    fn external(&mut self, size: u64) -> usize {
        let id = self.graph.external(format!("v{}", self.values.len()), ByteSize::new(size));
        let own = self.push(id, size, None);
        self.values[own].is_external = true;
        own
    }

    fn node(&mut self, size: u64, reads: &[usize], overwrites: bool) -> usize {
        let operands: Vec<BufferId> = reads.iter().map(|at| self.values[*at].id).collect();
        let name = format!("v{}", self.values.len());
        let id = self.graph.node(name, ByteSize::new(size), &operands, overwrites);
        let own = self.push(id, size, None);
        self.values[own].reads = Some(reads.to_vec());
        own
    }

    fn view(&mut self, of: usize, at: u64, size: u64) -> usize {
        let (name, root) = (format!("v{}", self.values.len()), self.values[of].root);
        let id = self.graph.view(name, self.values[of].id, at, ByteSize::new(size));
        let is_external = self.values[root].is_external;
        let own = self.push(id, size, Some(root));
        self.values[own].is_external = is_external;
        own
    }

    fn keep(&mut self, at: usize) {
        self.graph.keep(self.values[at].id);
        self.values[at].is_kept = true;
    }

    fn place_in(&mut self, at: usize, kind: u32) {
        self.graph.set_kind(self.values[at].id, kind);
        self.values[at].kind = kind as usize;
    }

    fn problem(&self, align: u64) -> Problem {
        self.graph.problem(align).expect("a graph that can be posed")
    }

    /// Runs the graph in the memory of plans, one for each kind.
    fn run(&self, plans: &[Plan], is_upward: bool) {
        let byte = |at: usize| u8::try_from(1 + self.values[at].root % 250).expect("a byte");
        let empty = |plan: &Plan| -> Vec<Vec<u8>> {
            let bytes = |size: &ByteSize| vec![0; size.as_usize().expect("small")];
            plan.segments().iter().map(bytes).collect()
        };
        let mut memory: Vec<Vec<Vec<u8>>> = plans.iter().map(empty).collect();
        let spot = |at: usize, byte: u64| {
            let value = &self.values[at];
            let place = plans[value.kind].place(value.id);
            let offset = usize::try_from(place.offset + byte).expect("small");
            (value.kind, place.segment as usize, offset)
        };
        let check = |memory: &[Vec<Vec<u8>>], at: usize, read: u64, by: usize| {
            let value = &self.values[at];
            if !value.is_external && read < value.size {
                let (kind, segment, offset) = spot(at, read);
                let found = memory[kind][segment][offset];
                assert_eq!(
                    found,
                    byte(at),
                    "byte {read} of {at}, read by {by}, upward {is_upward}"
                );
            }
        };
        let count = self.values.len();
        for at in (0..count).filter(|at| self.values[*at].is_input) {
            for written in 0..self.values[at].size {
                let (kind, segment, offset) = spot(at, written);
                memory[kind][segment][offset] = byte(at);
            }
        }
        for at in 0..count {
            let Some(reads) = &self.values[at].reads else { continue };
            let ours = reads.iter().chain([&at]).filter(|read| !self.values[**read].is_external);
            let longest = ours.map(|read| self.values[*read].size).max().unwrap_or(0);
            for turn in 0..longest {
                let now = if is_upward { turn } else { longest - 1 - turn };
                reads.iter().for_each(|read| check(&memory, *read, now, at));
                if now < self.values[at].size {
                    let (kind, segment, offset) = spot(at, now);
                    memory[kind][segment][offset] = byte(at);
                }
            }
        }
        for at in (0..count).filter(|at| self.values[*at].is_kept) {
            (0..self.values[at].size).for_each(|read| check(&memory, at, read, count));
        }
    }

    fn run_both_ways(&self, plans: &[Plan]) {
        self.run(plans, true);
        self.run(plans, false);
    }
}

fn joint(model: &Model, align: u64, kinds: &[(&str, Option<ByteSize>)]) -> Vec<Plan> {
    let count = u32::try_from(kinds.len()).expect("few");
    let problems = model.graph.kinds(align, count).expect("a graph that can be posed");
    let kinds = kinds.iter().zip(&problems);
    let kinds: Vec<_> = kinds.map(|((name, limit), of)| (*name, of, *limit)).collect();
    let clock = ManualClock::new();
    let mut planner = Planner::new(&clock).budget(Duration::from_secs(1), 2_000);
    let plan = planner.plan_kinds(&kinds).expect("kinds that have plans");
    for (plan, problem) in plan.iter().zip(&problems) {
        plan.verify(problem).expect("its own plan");
    }
    plan
}

/// A graph of some twenty values, in two kinds of memory.
fn random_graph(seed: u64) -> Model {
    let mut random = Random::new(seed);
    let mut model = Model::default();
    for number in 0..8 + random.index(16) {
        let size = 1 + random.below(12);
        let own = match random.below(10) {
            _ if number == 0 => model.input(size),
            0 => model.input(size),
            1 => model.external(size),
            2..=4 => {
                let of = random.index(number);
                let room = model.values[of].size;
                let at = if random.below(2) == 0 { 0 } else { random.below(1 + room) };
                model.view(of, at, random.below(1 + room - at))
            }
            _ => {
                let reads: Vec<usize> =
                    (0..random.below(4)).map(|_| random.index(number)).collect();
                model.node(size, &reads, random.below(4) > 0)
            }
        };
        if model.values[own].root == own && random.below(4) == 0 {
            model.place_in(own, 1);
        }
        if random.below(8) == 0 {
            model.keep(own);
        }
    }
    model
}

#[test]
fn whatever_a_graph_is_its_plan_can_be_run() {
    for seed in 0..400 {
        println!("seed {seed}");
        let model = random_graph(seed);
        let limit = (seed % 2 == 0).then_some(ByteSize::new(16));
        let plan = joint(&model, 1 + seed % 4, &[("device", limit), ("host", None)]);
        model.run_both_ways(&plan);
    }
}

/// A perceptron of so many layers that is trained: forward, backward and optimizer steps.
fn training(layers: usize, width: u64) -> (Model, [usize; 3]) {
    let mut model = Model::default();
    let input = model.input(width);
    let mut trained = Vec::new();
    for _ in 0..layers {
        let (weights, moments) = (model.input(width), model.input(width));
        model.keep(weights);
        model.keep(moments);
        trained.push((weights, moments));
    }
    let mut activations = vec![input];
    for (weights, _) in &trained {
        let product = model.node(width, &[activations[activations.len() - 1], *weights], false);
        activations.push(model.node(width, &[product], true));
    }
    let forward = model.values.len();
    let mut gradient = model.node(width, &[activations[layers]], true);
    model.keep(gradient); // the loss, for those who watch
    let mut steps = Vec::new();
    for layer in (0..layers).rev() {
        let (weights, _) = trained[layer];
        steps.push((layer, model.node(width, &[activations[layer], gradient], false)));
        gradient = model.node(width, &[gradient, weights], true);
    }
    let backward = model.values.len();
    for (layer, of_weights) in steps {
        let (weights, moments) = trained[layer];
        // It writes into what it reads: no memory of its own.
        model.node(0, &[weights, moments, of_weights], false);
    }
    let optimizer = model.values.len();
    (model, [forward, backward, optimizer])
}

#[test]
fn forward_backward_and_optimizer_steps_are_one_joint_plan() {
    let (layers, width) = (12, 64);
    let (model, [forward, backward, optimizer]) = training(layers, width);
    let problem = model.problem(16);
    let plan = planned(&problem, 100_000, 0);
    model.run_both_ways(std::slice::from_ref(&plan));
    assert!(plan.is_optimal(), "{} of {}", plan.peak(), plan.bound());
    // Weights and moments stay; in the middle there are the activations or the gradients.
    let trained = 2 * layers as u64 * width;
    assert!(plan.peak().get() >= trained + layers as u64 * width);
    // Each step with memory of its own: what is made in it, and all that it keeps for the next.
    let sum = |from: usize, until: usize| -> u64 {
        let made = model.values[from..until].iter();
        made.filter(|value| value.reads.is_some()).map(|value| value.size).sum()
    };
    let apart = trained + sum(0, forward) + sum(forward, backward) + sum(backward, optimizer);
    assert!(plan.peak().get() * 10 < apart * 8, "{} of {apart}", plan.peak());
    // By segments as well, and with the optimizer's state in other memory.
    let by_segments = planned_for(&problem, 10_000, Some(256));
    model.run_both_ways(&[by_segments]);
}

#[test]
fn weights_and_moments_may_lie_in_other_memory() {
    let (mut model, _) = training(6, 32);
    for at in 0..model.values.len() {
        if model.values[at].is_input && model.values[at].is_kept {
            model.place_in(at, 1);
        }
    }
    let host = Some(ByteSize::new(100));
    let plan = joint(&model, 8, &[("device", None), ("host", host)]);
    model.run_both_ways(&plan);
    assert_eq!(plan[1].peak(), ByteSize::new(2 * 6 * 32));
    assert!(plan[1].segments().iter().all(|size| *size <= ByteSize::new(100)));
}

#[test]
fn inputs_are_apart_at_the_start_outputs_stay_and_what_is_held_elsewhere_gets_nothing() {
    let mut model = Model::default();
    let held = model.external(1 << 40);
    let inputs = [model.input(8), model.input(8), model.input(8)];
    let one = model.node(8, &[inputs[0], held], true);
    model.keep(one);
    let two = model.node(8, &[inputs[1], one], true);
    let three = model.node(8, &[two, inputs[2]], true);
    model.keep(three);
    let problem = model.problem(8);
    let plan = planned(&problem, 1_000, 0);
    model.run_both_ways(std::slice::from_ref(&plan));
    assert_eq!(plan.peak(), ByteSize::new(24), "the inputs, and nothing beside them");
    assert!(problem.is_external(model.values[held].id));
    let places: Vec<u64> = inputs.iter().map(|at| plan.offset(model.values[*at].id)).collect();
    assert_eq!(places.iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
    assert_ne!(plan.offset(model.values[one].id), plan.offset(model.values[three].id));
}

#[test]
fn a_graph_of_many_views_and_nodes_is_posed_in_no_time() {
    // A chain of a hundred thousand views, each of the one before: no walk is repeated.
    let mut model = Model::default();
    let mut at = model.input(64);
    for _ in 0..100_000 {
        at = model.view(at, 0, 64);
    }
    let last = model.node(64, &[at], true);
    model.keep(last);
    let problem = model.problem(1);
    let plan = planned(&problem, 10, 0);
    assert_eq!(
        (plan.peak(), plan.offset(model.values[last].id)),
        (ByteSize::new(64), plan.offset(model.values[0].id))
    );
}
