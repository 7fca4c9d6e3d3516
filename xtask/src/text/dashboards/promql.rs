//! Expressions: which metrics they name, and which labels the series that they yield carry.
//!
//! It works out types only: a selector has the labels of its metric, an aggregation those it keeps,
//! and so on to the root. It knows the operators and functions that are used here, and refuses
//! others instead of guessing.
//!
//! Invariant: what two sides of an operator are matched by, both sides have.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use promql_parser::label::{MatchOp, Matchers};
use promql_parser::parser::{
    self, AggregateExpr, BinaryExpr, Call, Expr, LabelModifier, VectorMatchCardinality,
    VectorSelector,
};

use crate::text::names::{Kind, TABLE};

/// Labels that Prometheus gives each series it scrapes; `namespace` and `pod` in Kubernetes only,
/// and elsewhere they are empty.
const TARGET: [&str; 4] = ["namespace", "job", "pod", "instance"];
/// A further label by which panels select, if a series has it.
const DEVICE: &str = "device";
/// Replace Grafana's variables, which do not parse. No query has these ranges itself.
const RATE_INTERVAL: &str = "4m17s";
const RANGE: &str = "3m51s";
/// Functions over a range that choose among its values, so that a panel may fix the range.
const CHOOSING: [&str; 2] = ["min_over_time", "max_over_time"];

/// Labels of the series of an expression; `None` for a number.
pub(crate) type Labels = Option<BTreeSet<String>>;

/// The series that a name stands for.
#[derive(Clone, Debug)]
struct Series {
    labels: BTreeSet<String>,
    /// `true` if it only rises, so that `rate` and `increase` belong around it.
    rises: bool,
    /// The metric of the table, or the rule's own name.
    metric: String,
}

/// The names that expressions may use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known(BTreeMap<String, Series>);

impl Known {
    /// The metrics of the table, histograms by their three series, and `up`.
    pub(crate) fn table() -> Self {
        let mut known = Self::default();
        for metric in TABLE {
            let histogram = metric.kind == Kind::Histogram;
            let suffixes: &[&str] = if histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
            for suffix in suffixes {
                let mut labels: BTreeSet<String> =
                    metric.labels.iter().chain(&TARGET).map(ToString::to_string).collect();
                if *suffix == "_bucket" {
                    labels.insert("le".to_owned());
                }
                let rises = metric.kind != Kind::Gauge;
                let series = Series { labels, rises, metric: metric.name.to_owned() };
                known.0.insert(format!("{}{suffix}", metric.name), series);
            }
        }
        // Prometheus's own, of each target.
        let labels = TARGET.into_iter().map(str::to_owned).collect();
        known.0.insert("up".to_owned(), Series { labels, rises: false, metric: "up".to_owned() });
        known
    }

    /// Adds what a recording rule makes.
    pub(crate) fn record(&mut self, name: &str, labels: Labels) {
        let labels = labels.unwrap_or_default();
        let series = Series { labels, rises: false, metric: name.to_owned() };
        self.0.insert(name.to_owned(), series);
    }
}

/// The rules that apply to an expression because of its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A panel: each selector matches the variables, each range is Grafana's.
    Panel,
    /// A rule: neither.
    Rule,
}

/// The findings in an expression.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) labels: Labels,
    /// Metrics of the table and names of rules.
    pub(crate) metrics: BTreeSet<String>,
    pub(crate) faults: Vec<String>,
}

/// Checks one expression.
pub(crate) fn check(text: &str, place: Place, known: &Known) -> Findings {
    let mut check = Check { place, known, found: Findings::default() };
    let parsed = text.replace("$__rate_interval", RATE_INTERVAL).replace("$__range", RANGE);
    match parser::parse(&parsed) {
        Ok(expr) => check.found.labels = check.expr(&expr),
        Err(error) => check.fault(error),
    }
    let mut found = check.found;
    found.faults.iter_mut().for_each(|fault| *fault = format!("{fault}, in: {text}"));
    found
}

#[derive(Debug)]
struct Check<'a> {
    place: Place,
    known: &'a Known,
    found: Findings,
}

impl Check<'_> {
    fn fault(&mut self, what: impl Into<String>) {
        self.found.faults.push(what.into());
    }

    fn expr(&mut self, expr: &Expr) -> Labels {
        match expr {
            Expr::Paren(inner) => self.expr(&inner.expr),
            Expr::Unary(inner) => self.expr(&inner.expr),
            Expr::NumberLiteral(_) => None,
            Expr::VectorSelector(selector) => self.selector(selector, false),
            Expr::Aggregate(aggregate) => self.aggregate(aggregate),
            Expr::Binary(binary) => self.binary(binary),
            Expr::Call(call) => self.call(call),
            Expr::MatrixSelector(_) => {
                self.fault("a range outside a function");
                None
            }
            Expr::Subquery(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {
                self.fault("a kind of expression that this check does not know");
                None
            }
        }
    }

    /// A selector of instants, or the one under a range in `rate` and `increase`.
    fn selector(&mut self, selector: &VectorSelector, rated: bool) -> Labels {
        let Some(name) = &selector.name else {
            self.fault("a selector without a name");
            return None;
        };
        let known = self.known;
        let Some(series) = known.0.get(name) else {
            self.fault(format!("{name} is in no table and made by no rule before"));
            return None;
        };
        self.found.metrics.insert(series.metric.clone());
        if series.rises != rated {
            let what = if rated { "a gauge in rate or increase" } else { "a total without rate" };
            self.fault(format!("{name}: {what}"));
        }
        self.matchers(name, &selector.matchers, &series.labels);
        Some(series.labels.clone())
    }

    fn matchers(&mut self, name: &str, matchers: &Matchers, labels: &BTreeSet<String>) {
        for matcher in &matchers.matchers {
            if !labels.contains(&matcher.name) {
                self.fault(format!("{name} has no label {}", matcher.name));
            }
        }
        if self.place == Place::Panel {
            for target in TARGET.into_iter().chain(labels.contains(DEVICE).then_some(DEVICE)) {
                let variable = format!("${target}");
                let matched = matchers.matchers.iter().any(|matcher| {
                    matcher.name == target
                        && matches!(matcher.op, MatchOp::Re(_))
                        && matcher.value == variable
                });
                if !matched {
                    self.fault(format!("{name}: expected {target}=~\"{variable}\""));
                }
            }
        }
    }

    fn aggregate(&mut self, aggregate: &AggregateExpr) -> Labels {
        let inner = self.expr(&aggregate.expr).unwrap_or_default();
        // They choose among series and leave them as they are.
        let chooses = ["topk", "bottomk"].contains(&aggregate.op.to_string().as_str());
        if chooses && aggregate.modifier.is_none() {
            return Some(inner);
        }
        let Some(modifier) = &aggregate.modifier else { return Some(BTreeSet::new()) };
        self.all_in(&modifier.labels().labels, &inner, "is aggregated by");
        Some(kept(&inner, modifier))
    }

    fn binary(&mut self, binary: &BinaryExpr) -> Labels {
        let sides = (self.expr(&binary.lhs), self.expr(&binary.rhs));
        let (left, right) = match sides {
            (Some(left), Some(right)) => (left, right),
            (Some(one), None) | (None, Some(one)) => return Some(one),
            (None, None) => return None,
        };
        let modifier = binary.modifier.as_ref();
        let matching = modifier.and_then(|modifier| modifier.matching.as_ref());
        if let Some(matching) = matching {
            self.all_in(&matching.labels().labels, &left, "is matched by");
            if matching.is_include() {
                self.all_in(&matching.labels().labels, &right, "is matched by");
            }
        }
        let none = LabelModifier::exclude(Vec::new());
        let by = matching.unwrap_or(&none);
        if kept(&left, by) != kept(&right, by) {
            self.fault(format!("{:?} never match {:?}", kept(&left, by), kept(&right, by)));
        }
        if binary.op.is_set_operator() || binary.op.is_comparison_operator() {
            return Some(left);
        }
        match modifier.map(|modifier| &modifier.card) {
            None | Some(VectorMatchCardinality::OneToOne) => Some(kept(&left, by)),
            Some(VectorMatchCardinality::ManyToOne(added)) => {
                self.all_in(&added.labels, &right, "takes the label");
                Some(left.into_iter().chain(added.labels.iter().cloned()).collect())
            }
            Some(_) => {
                self.fault("group_right: this check does not know it");
                Some(left)
            }
        }
    }

    fn call(&mut self, call: &Call) -> Labels {
        let arguments: Vec<&Expr> = call.args.args.iter().map(|argument| &**argument).collect();
        match (call.func.name, arguments.as_slice()) {
            ("time", []) => None,
            (
                name @ ("rate" | "increase" | "changes" | "deriv" | "last_over_time"
                | "min_over_time" | "max_over_time"),
                [range],
            ) => self.range(name, range),
            ("histogram_quantile", [_, buckets]) => {
                let mut labels = self.expr(buckets).unwrap_or_default();
                if !labels.remove("le") {
                    self.fault("histogram_quantile over series without le");
                }
                Some(labels)
            }
            (name, _) => {
                self.fault(format!("{name}: a function that this check does not know"));
                None
            }
        }
    }

    fn range(&mut self, function: &str, range: &Expr) -> Labels {
        let Expr::MatrixSelector(range) = range else {
            self.fault(format!("{function} over something else than a range"));
            return None;
        };
        // 4m17s and 3m51s, as they are parsed.
        let variable = [4 * 60 + 17, 3 * 60 + 51].map(Duration::from_secs).contains(&range.range);
        if variable != (self.place == Place::Panel) && !CHOOSING.contains(&function) {
            self.fault("$__rate_interval is for panels, and panels have no other range");
        }
        self.selector(&range.vs, matches!(function, "rate" | "increase"))
    }

    fn all_in(&mut self, labels: &[String], among: &BTreeSet<String>, what: &str) {
        for label in labels.iter().filter(|label| !among.contains(*label)) {
            self.fault(format!("{what} {label}, which is not among {among:?}"));
        }
    }
}

/// The labels that stay under `by`, `on`, `without` or `ignoring`.
fn kept(labels: &BTreeSet<String>, by: &LabelModifier) -> BTreeSet<String> {
    let named = |label: &&String| by.labels().labels.contains(*label);
    labels.iter().filter(|label| named(label) == by.is_include()).cloned().collect()
}
