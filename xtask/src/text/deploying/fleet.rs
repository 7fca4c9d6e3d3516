//! Checks the files of the example with Envoy, `deploy/envoy`.
//!
//! `cargo xtask ci --job fleet` has Envoy read its configuration, and runs it.
//!
//! Invariant: each file has the three limits, and names what the others call it.

use yaml_rust2::Yaml;

use super::files::{END_S, OPERATORS, PORT, USER, strings, text_of};
use super::{Deploying, GUIDE};

const ENVOY: &str = "deploy/envoy/envoy.yaml";
const COMPOSE: &str = "deploy/envoy/compose.yaml";
const MANIFESTS: &str = "deploy/envoy/kubernetes.yaml";
const SCRIPT: &str = "deploy/envoy/run.sh";

/// The name of the options of a cluster for HTTP.
const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

/// The limits in MiB, as in the bench.
const LIMITS: [u64; 3] = [128, 256, 512];
/// The name that resolves to all proxies.
const NAME: &str = "proxies";
/// The port on which Envoy listens.
const LISTENS: i64 = 10_000;

pub(super) fn check(all: &Deploying<'_>) {
    all.check_envoy();
    all.check_fleet_compose();
    all.check_fleet_pods();
    all.check_script();
}

impl Deploying<'_> {
    /// Checks that Envoy finds the proxies, and that their timeouts suit each other.
    fn check_envoy(&self) {
        let resources = &self.yaml(ENVOY)[0]["static_resources"];
        let (cluster, listener) = (&resources["clusters"][0], &resources["listeners"][0]);
        let endpoints = &cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
        let endpoint = &endpoints[0]["endpoint"];
        let to = &endpoint["address"]["socket_address"];
        self.same(ENVOY, "address", to["address"].as_str(), Some(NAME));
        self.same(ENVOY, "port", to["port_value"].as_i64(), PORT.parse().ok());
        let checked = endpoint["health_check_config"]["port_value"].as_i64();
        self.same(ENVOY, "port of health checks", checked, OPERATORS.parse().ok());
        let path = cluster["health_checks"][0]["http_health_check"]["path"].as_str();
        self.same(ENVOY, "path of health checks", path, Some("/readyz"));
        let listens = listener["address"]["socket_address"]["port_value"].as_i64();
        self.same(ENVOY, "listener", listens, Some(LISTENS));
        let manager = &listener["filter_chains"][0]["filters"][0]["typed_config"];
        let removed = strings(&manager["route_config"]["response_headers_to_remove"]);
        let reports = vec!["endpoint-load-metrics", "endpoint-load-metrics-bin"];
        self.same(ENVOY, "response_headers_to_remove", removed, reports.clone());
        // Those of gRPC.
        let mutations = &manager["http_filters"][0]["typed_config"]["mutations"];
        let trailers = mutations["response_trailers_mutations"].as_vec().into_iter().flatten();
        let removed = trailers.filter_map(|one| one["remove"].as_str()).collect();
        self.same(ENVOY, "response_trailers_mutations", removed, reports);
        let policy = &cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"];
        let name = text_of(&policy["name"]);
        let is_weighted = name.ends_with(".client_side_weighted_round_robin");
        self.holds(ENVOY, is_weighted, &format!("{name}: not by load reports"));
        // A proxy that closes a connection just as Envoy uses it makes a request fail.
        let options = &cluster["typed_extension_protocol_options"][OPTIONS];
        let idle = text_of(&options["common_http_protocol_options"]["idle_timeout"]);
        let head = self.row("PROXY_HEAD_TIMEOUT").get(1).copied().unwrap_or_default();
        let [idle, head] = [idle, head.trim_matches('`')].map(|time| self.seconds(ENVOY, time));
        let what = format!("idle_timeout {idle} s: expected less than {head} s");
        self.holds(ENVOY, idle < head, &what);
    }

    /// The services have the limits, few rights, and the name that Envoy looks up.
    fn check_fleet_compose(&self) {
        let compose = &self.yaml(COMPOSE)[0];
        let services = compose["services"].as_hash();
        let names = services.into_iter().flat_map(|all| all.keys()).filter_map(Yaml::as_str);
        let proxies = LIMITS.map(|limit| format!("proxy-{limit}"));
        let expected: Vec<_> = proxies.iter().map(String::as_str).chain(["envoy"]).collect();
        self.same(COMPOSE, "services", names.collect(), expected);
        // What they share.
        let shared = &compose["x-proxy"];
        let aliases = strings(&shared["networks"]["default"]["aliases"]);
        self.same(COMPOSE, "aliases", aliases, vec![NAME]);
        let envoy = &compose["services"]["envoy"];
        for (name, service) in [("x-proxy", shared), ("envoy", envoy)] {
            self.same(COMPOSE, name, service["read_only"].as_bool(), Some(true));
            self.same(COMPOSE, name, strings(&service["cap_drop"]), vec!["ALL"]);
            let options = vec!["no-new-privileges:true"];
            self.same(COMPOSE, name, strings(&service["security_opt"]), options);
        }
        for (name, limit) in proxies.iter().zip(LIMITS) {
            let service = &compose["services"][name.as_str()];
            let expected = format!("{limit}m");
            for key in ["mem_limit", "memswap_limit"] {
                self.same(COMPOSE, key, service[key].as_str(), Some(&*expected));
            }
        }
        let published = format!("127.0.0.1:{LISTENS}:{LISTENS}");
        self.same(COMPOSE, "ports", strings(&envoy["ports"]), vec![&*published]);
        let reports = text_of(&shared["environment"]["PROXY_LOAD_REPORTS"]);
        self.same(COMPOSE, "PROXY_LOAD_REPORTS", reports, "text");
    }

    /// The Deployments have the limits, and the Service has the pods of all of them.
    fn check_fleet_pods(&self) {
        let documents = self.yaml(MANIFESTS);
        let named = |name: &str| {
            let is_it = |one: &&Yaml| one["metadata"]["name"].as_str() == Some(name);
            documents.iter().find(is_it).unwrap_or(&Yaml::BadValue)
        };
        let service = &named(NAME)["spec"];
        self.same(MANIFESTS, "clusterIP", service["clusterIP"].as_str(), Some("None"));
        let chosen = &service["selector"]["app.kubernetes.io/name"];
        let version = self.code.within("Cargo.toml", "\nversion = \"", "\"");
        for limit in LIMITS {
            let template = &named(&format!("proxy-{limit}"))["spec"]["template"];
            let label = &template["metadata"]["labels"]["app.kubernetes.io/name"];
            self.same(MANIFESTS, "label", label, chosen);
            let pod = &template["spec"];
            let user = pod["securityContext"]["runAsUser"].as_i64();
            self.same(MANIFESTS, "runAsUser", user, Some(USER));
            let proxy = &pod["containers"][0];
            let image = text_of(&proxy["image"]);
            let is_ours = image.ends_with(&format!("/lowtide-proxy:{version}"));
            self.holds(MANIFESTS, is_ours, &format!("{image}: expected version {version}"));
            let expected = format!("{limit}Mi");
            for key in ["requests", "limits"] {
                let memory = proxy["resources"][key]["memory"].as_str();
                self.same(MANIFESTS, key, memory, Some(&*expected));
            }
            let env = |name: &str| {
                let mut all = proxy["env"].as_vec().into_iter().flatten();
                let found = all.find(|one| one["name"].as_str() == Some(name));
                found.and_then(|one| one["value"].as_str()).unwrap_or_default()
            };
            self.same(MANIFESTS, "PROXY_LOAD_REPORTS", env("PROXY_LOAD_REPORTS"), "text");
            let [drain, grace] =
                ["PROXY_DRAIN", "PROXY_GRACE"].map(|name| self.seconds(MANIFESTS, env(name)));
            let before = proxy["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64();
            let end = before.unwrap_or_default().unsigned_abs() + drain + grace + END_S;
            let patience = pod["terminationGracePeriodSeconds"].as_i64().unwrap_or_default();
            let what = format!("terminationGracePeriodSeconds {patience}: expected over {end}");
            self.holds(MANIFESTS, end < patience.unsigned_abs(), &what);
        }
        let is_generated = self.text("deploy/envoy/kustomization.yaml").contains("[envoy.yaml]");
        self.holds(MANIFESTS, is_generated, "no map with envoy.yaml");
    }

    /// The script has the limits, and is in the guide.
    fn check_script(&self) {
        let limits = LIMITS.map(|limit| format!("{limit}m")).join(" ");
        let has_limits = self.text(SCRIPT).contains(&limits);
        self.holds(SCRIPT, has_limits, &format!("no {limits:?}"));
        let guide = self.text(GUIDE);
        for command in [
            "deploy/envoy/run.sh ",
            "docker compose -f deploy/envoy/compose.yaml up",
            "kubectl apply -k deploy/envoy",
        ] {
            self.holds(GUIDE, guide.contains(command), &format!("no {command:?}"));
        }
    }
}
