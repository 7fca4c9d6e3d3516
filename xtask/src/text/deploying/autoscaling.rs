//! Checks the files by which autoscalers and endpoint pickers read the proxy's metrics: KEDA, an
//! HPA with prometheus-adapter, the Gateway API's endpoint picker.
//!
//! Queries are parsed, and what they name is compared with the table of metrics. `cargo xtask ci
//! --job deployment` also validates the manifests and has promtool parse the queries; `.ci/
//! dashboards/run` asks one of a real Prometheus.
//!
//! Invariant: both autoscalers scale the same Deployment, in the same bounds, to the same target.

use yaml_rust2::{Yaml, YamlLoader};

use super::Deploying;
use super::files::{OPERATORS, PORT, text_of};
use crate::text::dashboards::promql::{self, Known, Place};
use crate::text::metrics_tier::MetricsTier;
use crate::text::names::{Kind, TABLE};

const KEDA: &str = "deploy/keda.yaml";
const HPA: &str = "deploy/hpa.yaml";
const ADAPTER: &str = "deploy/prometheus-adapter.yaml";
const PICKER: &str = "deploy/endpoint-picker.yaml";
/// The Deployment that they scale and choose from.
const POD: &str = "deploy/kubernetes.yaml";
/// The metric that an autoscaler reads.
const SATURATION: &str = "lowtide_saturation_ratio";
/// What prometheus-adapter puts into a query.
const TEMPLATES: [(&str, &str); 3] = [
    ("<<.Series>>", SATURATION),
    ("<<.LabelMatchers>>", r#"namespace="default", pod=~"one|two""#),
    ("<<.GroupBy>>", "pod"),
];

/// Checks all of them.
pub(super) fn check(all: &Deploying<'_>) {
    all.check_keda();
    all.check_hpa();
    all.check_adapter();
    all.check_picker();
}

/// The queries in the texts of KEDA's manifest and of prometheus-adapter's values, as they are sent
/// to Prometheus.
pub(crate) fn queries(keda: &str, adapter: &str) -> Vec<String> {
    let first = |text| YamlLoader::load_from_str(text).ok()?.into_iter().next();
    let [keda, adapter] = [keda, adapter].map(|text| first(text).unwrap_or(Yaml::BadValue));
    let rule = &adapter["rules"]["custom"][0];
    let filled = TEMPLATES
        .iter()
        .fold(text_of(&rule["metricsQuery"]).to_owned(), |query, (template, value)| {
            query.replace(template, value)
        });
    let of_keda = text_of(&keda["spec"]["triggers"][0]["metadata"]["query"]);
    vec![of_keda.to_owned(), text_of(&rule["seriesQuery"]).to_owned(), filled]
}

impl Deploying<'_> {
    /// The name and the replicas of the Deployment.
    fn deployment(&self) -> (String, Option<i64>) {
        let deployment = &self.yaml(POD)[0];
        let name = text_of(&deployment["metadata"]["name"]).to_owned();
        (name, deployment["spec"]["replicas"].as_i64())
    }

    /// A query reads metrics that are published by default.
    fn check_query(&self, file: &str, query: &str) {
        let found = promql::check(query, Place::Rule, &Known::table());
        self.holds(file, !found.metrics.is_empty(), &format!("{query:?} reads no metric"));
        found.faults.iter().for_each(|fault| self.holds(file, false, fault));
        found.metrics.iter().for_each(|name| self.check_metric(file, name));
    }

    /// A metric is a gauge that is published by default.
    fn check_metric(&self, file: &str, name: &str) {
        let is_one = TABLE.iter().any(|metric| {
            metric.name == name
                && metric.tier == MetricsTier::Basic
                && metric.kind == Kind::Gauge
                && metric.labels.is_empty()
        });
        self.holds(file, is_one, &format!("{name} is no gauge without labels of the tier basic"));
    }

    fn check_keda(&self) {
        let scaled = &self.yaml(KEDA)[0];
        self.same(KEDA, "kind", scaled["kind"].as_str(), Some("ScaledObject"));
        let (name, replicas) = self.deployment();
        let spec = &scaled["spec"];
        self.same(KEDA, "target", text_of(&spec["scaleTargetRef"]["name"]), &*name);
        self.same(KEDA, "minReplicaCount", spec["minReplicaCount"].as_i64(), replicas);
        let fallback = &spec["fallback"];
        let behavior = fallback["behavior"].as_str();
        self.same(KEDA, "fallback", behavior, Some("currentReplicasIfHigher"));
        let least = fallback["replicas"].as_i64();
        self.holds(KEDA, least >= replicas, "the fallback removes pods");
        let trigger = &spec["triggers"][0];
        self.same(KEDA, "type", trigger["type"].as_str(), Some("prometheus"));
        // The fallback needs it, and the query is a sum.
        self.same(KEDA, "metricType", trigger["metricType"].as_str(), Some("AverageValue"));
        let query = &trigger["metadata"];
        // With KEDA's default, no answer is a saturation of 0.
        let ignores = query["ignoreNullValues"].as_str();
        self.same(KEDA, "ignoreNullValues", ignores, Some("false"));
        let text = text_of(&query["query"]);
        self.holds(KEDA, text.starts_with("sum("), &format!("{text:?} is no sum"));
        let pods = format!("pod=~\"{name}-.+\"");
        self.holds(KEDA, text.contains(&pods), &format!("no {pods}"));
        self.check_query(KEDA, text);
    }

    fn check_hpa(&self) {
        let hpa = &self.yaml(HPA)[0];
        self.same(HPA, "kind", hpa["kind"].as_str(), Some("HorizontalPodAutoscaler"));
        let keda = &self.yaml(KEDA)[0]["spec"];
        let spec = &hpa["spec"];
        let target = &spec["scaleTargetRef"];
        self.same(HPA, "target", &target["name"], &keda["scaleTargetRef"]["name"]);
        self.same(HPA, "minReplicas", &spec["minReplicas"], &keda["minReplicaCount"]);
        self.same(HPA, "maxReplicas", &spec["maxReplicas"], &keda["maxReplicaCount"]);
        let behavior = &keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"];
        self.same(HPA, "behavior", &spec["behavior"], behavior);
        let pods = &spec["metrics"][0]["pods"];
        self.same(HPA, "metric", pods["metric"]["name"].as_str(), Some(SATURATION));
        self.check_metric(HPA, SATURATION);
        // Thousandths, as Kubernetes writes them.
        let value = text_of(&pods["target"]["averageValue"]).trim_end_matches('m').parse::<f64>();
        let threshold = text_of(&keda["triggers"][0]["metadata"]["threshold"]).parse::<f64>();
        let are_equal = value.is_ok_and(|value| {
            threshold.is_ok_and(|threshold| (value / 1000.0 - threshold).abs() < 1e-9)
        });
        self.holds(HPA, are_equal, "another target than KEDA's threshold");
    }

    fn check_adapter(&self) {
        let found = queries(self.text(KEDA), self.text(ADAPTER));
        found.iter().skip(1).for_each(|query| self.check_query(ADAPTER, query));
        let rule = &self.yaml(ADAPTER)[0]["rules"]["custom"][0];
        for (template, _) in TEMPLATES {
            let has = text_of(&rule["metricsQuery"]).contains(template);
            self.holds(ADAPTER, has, &format!("no {template}"));
        }
        for label in ["namespace", "pod"] {
            let resource = rule["resources"]["overrides"][label]["resource"].as_str();
            self.same(ADAPTER, label, resource, Some(label));
        }
    }

    /// The picker's pool is the proxy's pods, and its plugins read our metrics where they are.
    fn check_picker(&self) {
        let documents = self.yaml(PICKER);
        let kinds: Vec<_> = documents.iter().filter_map(|one| one["kind"].as_str()).collect();
        let expected = vec![
            "InferencePool",
            "ConfigMap",
            "Deployment",
            "Service",
            "ServiceAccount",
            "Role",
            "RoleBinding",
        ];
        self.same(PICKER, "kinds", kinds, expected);
        let (pool, picker) = (&documents[0], &documents[2]);
        let labels = &self.yaml(POD)[0]["spec"]["template"]["metadata"]["labels"];
        self.same(PICKER, "selector", &pool["spec"]["selector"]["matchLabels"], labels);
        let port = |number: &Yaml| number.as_i64().map(|port| port.to_string());
        let clients = port(&pool["spec"]["targetPorts"][0]["number"]);
        self.same(PICKER, "targetPorts", clients.as_deref(), Some(PORT));
        let arguments = &picker["spec"]["template"]["spec"]["containers"][0]["args"];
        let pool_name = format!("--pool-name={}", text_of(&pool["metadata"]["name"]));
        let names_pool = arguments.as_vec().is_some_and(|all| {
            all.iter().any(|argument| argument.as_str() == Some(pool_name.as_str()))
        });
        self.holds(PICKER, names_pool, &format!("no {pool_name}"));

        let text = text_of(&documents[1]["data"]["config.yaml"]);
        let config = YamlLoader::load_from_str(text).unwrap_or_default();
        let Some(config) = config.first() else {
            return self.holds(PICKER, false, "no configuration");
        };
        let plugins = config["plugins"].as_vec().cloned().unwrap_or_default();
        let of = |kind: &str| plugins.iter().find(|plugin| plugin["type"].as_str() == Some(kind));
        let parameters = |kind| of(kind).map_or(&Yaml::BadValue, |plugin| &plugin["parameters"]);
        let scraped = port(&parameters("metrics-data-source")["port"]);
        self.same(PICKER, "the scraped port", scraped.as_deref(), Some(OPERATORS));
        let extractor = parameters("core-metrics-extractor");
        let engine = &extractor["engineConfigs"][0];
        self.same(PICKER, "defaultEngine", &extractor["defaultEngine"], &engine["name"]);
        for spec in ["queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"] {
            self.check_metric(PICKER, text_of(&engine[spec]));
        }
        let references = text.split("pluginRef: ").skip(1);
        for name in references.map(|after| after.split([' ', ',', '}', '\n']).next()) {
            let name = name.unwrap_or_default();
            self.holds(PICKER, of(name).is_some(), &format!("no plugin {name:?}"));
        }
    }
}
