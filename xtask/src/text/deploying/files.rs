//! The files that are deployed: Dockerfile, Compose, Kubernetes, systemd, Prometheus.
//!
//! Held against each other and against what the proxy needs; the tools that read them for real are
//! called by `.ci/run` where there are any.
//!
//! Invariant: whoever stops the proxy waits longer than its drain, its grace and the 5 s of the
//! memory's end.

use std::path::Path;

use yaml_rust2::{Yaml, YamlLoader};

use super::{GUIDE, text};

/// Those that set variables of the crate.
pub(crate) const ALL: [&str; 4] =
    ["Dockerfile", "compose.yaml", "deploy/kubernetes.yaml", "deploy/lowtide-proxy.service"];

/// How long the end of the memory takes at most, after the grace.
const END_S: u64 = 5;
/// How long `docker stop` waits before it kills.
const DOCKER_STOP_S: u64 = 10;
const PORT: &str = "8080";
/// Where operators are answered, and nobody else.
const OPERATORS: &str = "8081";
const USER: i64 = 10_001;

fn yaml(file: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(&text(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn seconds(time: &str) -> u64 {
    humantime::parse_duration(time).unwrap_or_else(|error| panic!("{time}: {error}")).as_secs()
}

/// The value after `NAME=` in a text.
fn set<'a>(text: &'a str, name: &str) -> &'a str {
    let after = text.split_once(&format!("{name}=")).unwrap_or_else(|| panic!("no {name}")).1;
    after.split([' ', '\n']).next().unwrap_or_default()
}

/// How long the end of the image's proxy takes at most.
fn image_end_s() -> u64 {
    let image = text("Dockerfile");
    seconds(set(&image, "PROXY_DRAIN")) + seconds(set(&image, "PROXY_GRACE")) + END_S
}

fn strings(of: &Yaml) -> Vec<&str> {
    of.as_vec().map(|all| all.iter().filter_map(Yaml::as_str).collect()).unwrap_or_default()
}

fn is_there(path: &str) -> bool {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists()
}

#[test]
fn the_image_is_the_binary_and_its_libraries_without_root_or_shell() {
    let image = text("Dockerfile");
    let stages: Vec<_> = image.lines().filter(|line| line.starts_with("FROM ")).collect();
    assert_eq!(stages.last(), Some(&"FROM scratch"), "{stages:?}");
    assert!(image.contains(&format!("\nUSER {USER}:{USER}\n")), "a numeric user");
    for wanted in [
        "\nENTRYPOINT [\"/usr/local/bin/proxy\"]\n",
        "CMD [\"/usr/local/bin/proxy\", \"healthcheck\"]\n",
        "\nSTOPSIGNAL SIGTERM\n",
        "MALLOC_ARENA_MAX=2\n",
        "NVIDIA_VISIBLE_DEVICES=all ",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility\n",
    ] {
        assert!(image.contains(wanted), "no {wanted:?}");
    }
    // What Docker 20.10 does not know, or would fetch.
    for newer in ["# syntax", "<<", "--link", "--start-interval"] {
        assert!(!image.contains(newer), "{newer} is for newer engines");
    }
    assert!(image_end_s() < DOCKER_STOP_S);
    assert!(image.contains(&format!("EXPOSE {PORT} {OPERATORS}\n")));
    assert_eq!(set(&image, "PROXY_OPERATORS"), format!("0.0.0.0:{OPERATORS}"));
    assert_eq!(set(&image, "PROXY_LISTEN"), format!("0.0.0.0:{PORT}"));
}

#[test]
fn what_the_image_is_built_of_goes_to_the_daemon() {
    let goes = text(".dockerignore");
    for needed in ["Cargo.toml", "Cargo.lock", "src", "examples", "deploy/image-root", "LICENSE-*"]
    {
        assert!(goes.lines().any(|line| line == format!("!{needed}")), "{needed} stays behind");
    }
    let passwd = format!("lowtide:x:{USER}:{USER}:");
    assert!(text("deploy/image-root").contains(&passwd), "the user has a name");
}

#[test]
fn each_service_of_the_compose_file_has_few_rights_a_limit_and_files_that_exist() {
    let compose = &yaml("compose.yaml")[0];
    let volumes = compose["volumes"].as_hash().expect("named volumes");
    let services = compose["services"].as_hash().expect("services");
    let names: Vec<_> = services.keys().filter_map(Yaml::as_str).collect();
    assert_eq!(names, ["proxy", "prometheus", "alertmanager", "grafana"]);
    for (name, service) in services {
        assert_eq!(service["read_only"].as_bool(), Some(true), "{name:?}");
        assert_eq!(strings(&service["cap_drop"]), ["ALL"], "{name:?}");
        assert_eq!(strings(&service["security_opt"]), ["no-new-privileges:true"], "{name:?}");
        assert!(service["mem_limit"].as_str().is_some(), "{name:?} has no limit");
        for port in strings(&service["ports"]) {
            assert!(port.starts_with("127.0.0.1:"), "{name:?}: {port} is open to the network");
        }
        for volume in strings(&service["volumes"]) {
            let parts: Vec<_> = volume.split(':').collect();
            if let Some(path) = parts[0].strip_prefix("./") {
                assert!(is_there(path), "{name:?} mounts {path}");
                assert_eq!(parts.get(2), Some(&"ro"), "{name:?}: {volume}");
            } else {
                assert!(volumes.contains_key(&Yaml::String(parts[0].into())), "{volume}");
            }
        }
    }
    let proxy = &compose["services"]["proxy"];
    assert_eq!(proxy["mem_limit"], proxy["memswap_limit"], "no swap");
    assert_eq!(proxy["environment"]["LOWTIDE_PROFILE"].as_str(), Some("low-memory"));
    let patience = seconds(proxy["stop_grace_period"].as_str().expect("a time"));
    assert!(image_end_s() < patience);
}

#[test]
fn what_watches_the_proxy_in_the_compose_file_finds_it() {
    let (compose, prometheus) = (&yaml("compose.yaml")[0], &yaml("deploy/prometheus.yml")[0]);
    let targets = &prometheus["scrape_configs"][0]["static_configs"][0]["targets"];
    assert_eq!(strings(targets), [format!("proxy:{OPERATORS}")]);
    let hosts = compose["services"]["proxy"]["environment"]["PROXY_HOSTS"].as_str();
    assert_eq!(hosts, Some("proxy"), "the name by which it is scraped, or the answer is 403");
    let alerts = &prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"];
    assert_eq!(strings(alerts), ["alertmanager:9093"]);
    let mounted = strings(&compose["services"]["prometheus"]["volumes"]).join("\n");
    for rules in strings(&prometheus["rule_files"]) {
        assert!(mounted.contains(&format!(":/etc/prometheus/{rules}:ro")), "{rules}");
    }
    let source = &yaml("dashboards/provisioning/datasources/prometheus.yml")[0]["datasources"][0];
    assert_eq!(source["url"].as_str(), Some("http://prometheus:9090"));
    let interval = &prometheus["global"]["scrape_interval"];
    assert_eq!(&source["jsonData"]["timeInterval"], interval, "of which rates are made");
    let boards = &yaml("dashboards/provisioning/dashboards/lowtide.yml")[0]["providers"][0];
    let folder = boards["options"]["path"].as_str().expect("a path");
    let grafana = strings(&compose["services"]["grafana"]["volumes"]).join("\n");
    assert!(grafana.contains(&format!("./dashboards:{folder}:ro")), "{grafana}");
    let alertmanager = &yaml("deploy/alertmanager.yml")[0];
    assert_eq!(alertmanager["route"]["receiver"], alertmanager["receivers"][0]["name"]);
}

#[test]
fn the_pod_has_one_limit_few_rights_and_time_to_end() {
    let documents = yaml("deploy/kubernetes.yaml");
    let kinds: Vec<_> = documents.iter().filter_map(|document| document["kind"].as_str()).collect();
    assert_eq!(kinds, ["Deployment", "Service", "PodMonitor"]);
    let pod = &documents[0]["spec"]["template"]["spec"];
    let labels = &documents[0]["spec"]["template"]["metadata"]["labels"];
    assert_eq!(pod["enableServiceLinks"].as_bool(), Some(false), "LOWTIDE_* stays clean");
    assert_eq!(pod["automountServiceAccountToken"].as_bool(), Some(false));
    assert_eq!(pod["securityContext"]["runAsNonRoot"].as_bool(), Some(true));
    assert_eq!(pod["securityContext"]["runAsUser"].as_i64(), Some(USER), "as in the image");
    let proxy = &pod["containers"][0];
    let image = proxy["image"].as_str().unwrap_or_default();
    let tag = image.split_once('/').and_then(|(_, name)| name.split_once(':'));
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(tag, Some(("lowtide-proxy", version)), "the bug: {image} is docker.io's latest");
    assert!(text("docs/DEPLOYING.md").contains(&format!("docker push {image}\n")));
    let resources = &proxy["resources"];
    assert_eq!(resources["requests"]["memory"], resources["limits"]["memory"]);
    assert!(resources["requests"]["cpu"].as_str().is_some());
    let rights = &proxy["securityContext"];
    assert_eq!(rights["readOnlyRootFilesystem"].as_bool(), Some(true));
    assert_eq!(rights["allowPrivilegeEscalation"].as_bool(), Some(false));
    assert_eq!(strings(&rights["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(proxy["ports"][0]["containerPort"].as_i64(), PORT.parse().ok());
    let operators = &proxy["ports"][1];
    assert_eq!(operators["containerPort"].as_i64(), OPERATORS.parse().ok());
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let asks = &proxy[probe]["httpGet"];
        assert_eq!(asks["path"].as_str(), Some("/healthz"), "{probe}: it never fails for pressure");
        assert_eq!(asks["port"], operators["name"], "{probe}: clients do not keep it waiting");
    }
    let env = |name| {
        let all = proxy["env"].as_vec()?.iter();
        all.into_iter().find(|one| one["name"].as_str() == Some(name))?["value"].as_str()
    };
    assert_eq!(env("LOWTIDE_PROFILE"), Some("low-memory"));
    let [drain, grace] =
        ["PROXY_DRAIN", "PROXY_GRACE"].map(|name| seconds(env(name).expect("set")));
    let before = proxy["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64().expect("no shell");
    let patience = pod["terminationGracePeriodSeconds"].as_i64().expect("set");
    assert!(before.unsigned_abs() + drain + grace + END_S < patience.unsigned_abs());
    let chosen = &documents[2]["spec"];
    assert_eq!(&chosen["selector"]["matchLabels"], labels);
    assert_eq!(&documents[1]["spec"]["selector"], labels);
    let scraped = &chosen["podMetricsEndpoints"][0];
    assert_eq!(
        (&scraped["port"], scraped["path"].as_str()),
        (&operators["name"], Some("/metrics"))
    );
    let published = documents[1]["spec"]["ports"].as_vec().expect("ports");
    assert_eq!(published.len(), 1, "the bug: the service published /memory, /metrics and verbs");
    assert_eq!(published[0]["targetPort"], proxy["ports"][0]["name"]);
}

#[test]
fn the_unit_limits_memory_gives_no_rights_and_waits_for_the_end() {
    let unit = text("deploy/lowtide-proxy.service");
    for line in [
        "ExecStart=/usr/local/bin/proxy",
        "Environment=LOWTIDE_PROFILE=low-memory",
        "Environment=MALLOC_ARENA_MAX=2",
        "MemoryMax=256M",
        "MemorySwapMax=0",
        "TasksMax=512",
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "SystemCallFilter=@system-service",
    ] {
        assert!(unit.lines().any(|other| other == line), "no {line}");
    }
    assert_eq!(set(&unit, "PROXY_OPERATORS"), format!("127.0.0.1:{OPERATORS}"));
    assert!(!unit.contains("\nMemoryHigh="), "the crate would take it for the limit");
    assert!(!unit.contains("\nProcSubset="), "/proc/meminfo is read");
    let patience: u64 = set(&unit, "TimeoutStopSec").parse().expect("seconds");
    let [drain, grace] = ["PROXY_DRAIN", "PROXY_GRACE"].map(|name| seconds(set(&unit, name)));
    assert!(drain + grace + END_S < patience);
}

/// The bug: `/memory` was shown at the clients' port, which forwards it to the upstream.
#[test]
fn memory_was_shown_at_a_port_that_does_not_answer_it() {
    for page in ["docs/OPERATING.md", GUIDE, "README.md", "src/service/page/page.html"] {
        for (number, line) in text(page).lines().enumerate() {
            for path in ["/memory", "/metrics", "/readyz", "/healthz"] {
                let wrong = format!(":{PORT}{path}");
                assert!(!line.contains(&wrong), "{page}:{}: {line}", number + 1);
            }
        }
    }
    assert!(text("docs/OPERATING.md").contains(&format!("curl -s localhost:{OPERATORS}/memory\n")));
}
