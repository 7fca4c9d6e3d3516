//! Checks the deployment files: Dockerfile, Compose, Kubernetes, systemd, Prometheus.
//!
//! They are compared with each other and with the needs of the proxy. `cargo xtask ci --job
//! deployment` also runs the tools that read these files.
//!
//! Invariant: each file lets the proxy run longer after a stop than drain, grace period and the 5 s
//! of the memory's shutdown together.

use yaml_rust2::{Yaml, YamlLoader};

use super::{Deploying, GUIDE};

/// Those that set variables of the crate.
pub(super) const ALL: [&str; 7] = [
    "Dockerfile",
    "compose.yaml",
    "deploy/envoy/compose.yaml",
    "deploy/envoy/kubernetes.yaml",
    "deploy/envoy/run.sh",
    "deploy/kubernetes.yaml",
    "deploy/lowtide-proxy.service",
];

/// The longest time that the shutdown of the memory takes after the grace, in seconds.
pub(super) const END_S: u64 = 5;
/// The time that `docker stop` waits before it kills, in seconds.
const DOCKER_STOP_S: u64 = 10;
pub(super) const PORT: &str = "8080";
/// The port of the operators' routes, which are served on no other.
pub(super) const OPERATORS: &str = "8081";
pub(super) const USER: i64 = 10_001;
/// The folder in a container that outlives the process.
const STATE: &str = "/var/lib/lowtide";
/// The variables of what is written there, and the names.
const WRITTEN: [(&str, &str); 2] =
    [("LOWTIDE_FLIGHT_RECORDER", "recording"), ("LOWTIDE_HEAP_PROFILE_DIR", "profiles")];

/// Checks all of them.
pub(super) fn check(all: &Deploying<'_>) {
    all.check_dockerfile();
    all.check_context();
    all.check_services();
    all.check_watching();
    all.check_pod();
    all.check_pod_ports();
    all.check_unit();
    all.check_ports();
    all.check_state();
}

/// The value after `NAME=` in a text.
fn set<'a>(text: &'a str, name: &str) -> &'a str {
    let after = text.split_once(&format!("{name}=")).map_or("", |(_, after)| after);
    after.split([' ', '\n']).next().unwrap_or_default()
}

pub(super) fn strings(of: &Yaml) -> Vec<&str> {
    of.as_vec().map(|all| all.iter().filter_map(Yaml::as_str).collect()).unwrap_or_default()
}

pub(super) fn text_of(of: &Yaml) -> &str {
    of.as_str().unwrap_or_default()
}

impl Deploying<'_> {
    /// Adds a fault of a file if the condition does not hold.
    pub(super) fn holds(&self, file: &str, holds: bool, what: &str) {
        self.expect(holds, || format!("{file}: {what}"));
    }

    /// Adds a fault of a file if the values differ.
    pub(super) fn same<T: PartialEq + std::fmt::Debug>(
        &self,
        file: &str,
        what: &str,
        is: T,
        expected: T,
    ) {
        self.expect(is == expected, || format!("{file}: {what}: {is:?}: expected {expected:?}"));
    }

    /// The documents of a file; one that cannot be read is a fault of its own.
    pub(super) fn yaml(&self, file: &str) -> Vec<Yaml> {
        let documents = YamlLoader::load_from_str(self.text(file)).unwrap_or_default();
        self.holds(file, !documents.is_empty(), "no document");
        if documents.is_empty() { vec![Yaml::BadValue] } else { documents }
    }

    pub(super) fn seconds(&self, file: &str, time: &str) -> u64 {
        humantime::parse_duration(time).map_or_else(
            |error| {
                self.holds(file, false, &format!("{time:?}: {error}"));
                0
            },
            |time| time.as_secs(),
        )
    }

    /// Returns the longest time that the end of the image's proxy takes, in seconds.
    pub(super) fn image_end_s(&self) -> u64 {
        let image = self.text("Dockerfile");
        let [drain, grace] = ["PROXY_DRAIN", "PROXY_GRACE"].map(|name| set(image, name));
        self.seconds("Dockerfile", drain) + self.seconds("Dockerfile", grace) + END_S
    }

    /// The image is the binary and its libraries, without root or shell.
    fn check_dockerfile(&self) {
        let (file, image) = ("Dockerfile", self.text("Dockerfile"));
        let stages: Vec<_> = image.lines().filter(|line| line.starts_with("FROM ")).collect();
        self.same(file, "the last stage", stages.last().copied(), Some("FROM scratch"));
        for wanted in [
            &*format!("\nUSER {USER}:{USER}\n"),
            "\nENTRYPOINT [\"/usr/local/bin/proxy\"]\n",
            "CMD [\"/usr/local/bin/proxy\", \"healthcheck\"]\n",
            "\nSTOPSIGNAL SIGTERM\n",
            "MALLOC_ARENA_MAX=2\n",
            "NVIDIA_VISIBLE_DEVICES=all ",
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility\n",
            &*format!("EXPOSE {PORT} {OPERATORS}\n"),
        ] {
            self.holds(file, image.contains(wanted), &format!("no {wanted:?}"));
        }
        // What Docker 20.10 does not know, or would fetch.
        for newer in ["# syntax", "<<", "--link", "--start-interval"] {
            self.holds(file, !image.contains(newer), &format!("{newer} is for newer engines"));
        }
        let end = self.image_end_s();
        let what = format!("it ends within {end} s: expected less than {DOCKER_STOP_S} s");
        self.holds(file, end < DOCKER_STOP_S, &what);
        for (name, port) in [("PROXY_OPERATORS", OPERATORS), ("PROXY_LISTEN", PORT)] {
            self.same(file, name, set(image, name), &*format!("0.0.0.0:{port}"));
        }
    }

    /// Checks that the sources of the image are sent to the daemon.
    fn check_context(&self) {
        let goes = self.text(".dockerignore");
        let needed = ["Cargo.toml", "Cargo.lock", "src", "deploy/image-root", "LICENSE-*"];
        let manifest = self.text("Cargo.toml").lines();
        // Cargo builds nothing of a workspace that lacks a member.
        let members = manifest.filter_map(|line| line.strip_prefix("members = ["));
        let members: Vec<_> = members.flat_map(|list| list.split('"').skip(1).step_by(2)).collect();
        self.holds("Cargo.toml", !members.is_empty(), "no members");
        let folders = members.iter().filter_map(|member| member.split('/').next());
        for needed in folders.chain(needed) {
            let is_sent = goes.lines().any(|line| line == format!("!{needed}"));
            self.holds(".dockerignore", is_sent, &format!("{needed} is left out"));
        }
        let passwd = format!("lowtide:x:{USER}:{USER}:");
        let has_name = self.text("deploy/image-root").contains(&passwd);
        self.holds("deploy/image-root", has_name, &format!("no {passwd}"));
    }

    /// Each service of the Compose file has few rights, a limit, and files that exist.
    fn check_services(&self) {
        let file = "compose.yaml";
        let compose = &self.yaml(file)[0];
        let Some(services) = compose["services"].as_hash() else {
            return self.holds(file, false, "no services");
        };
        let names: Vec<_> = services.keys().filter_map(Yaml::as_str).collect();
        let expected = ["proxy", "prometheus", "alertmanager", "grafana"];
        self.same(file, "services", names.as_slice(), &expected);
        for (name, service) in services {
            let name = text_of(name);
            self.same(file, name, service["read_only"].as_bool(), Some(true));
            self.same(file, name, strings(&service["cap_drop"]), vec!["ALL"]);
            let options = vec!["no-new-privileges:true"];
            self.same(file, name, strings(&service["security_opt"]), options);
            let has_limit = service["mem_limit"].as_str().is_some();
            self.holds(file, has_limit, &format!("{name} has no mem_limit"));
            for port in strings(&service["ports"]) {
                let is_local = port.starts_with("127.0.0.1:");
                self.holds(file, is_local, &format!("{name}: {port} is open to the network"));
            }
            for volume in strings(&service["volumes"]) {
                let parts: Vec<_> = volume.split(':').collect();
                if let Some(path) = parts[0].strip_prefix("./") {
                    let exists = self.tree.has(path);
                    self.holds(file, exists, &format!("{name} mounts {path}: no such file"));
                    self.same(file, volume, parts.get(2), Some(&"ro"));
                } else {
                    let volumes = compose["volumes"].as_hash();
                    let key = Yaml::String(parts[0].into());
                    let is_known = volumes.is_some_and(|all| all.contains_key(&key));
                    self.holds(file, is_known, &format!("{name}: {volume}: no such volume"));
                }
            }
        }
        let proxy = &compose["services"]["proxy"];
        self.same(file, "swap of the proxy", &proxy["memswap_limit"], &proxy["mem_limit"]);
        let profile = proxy["environment"]["LOWTIDE_PROFILE"].as_str();
        self.same(file, "LOWTIDE_PROFILE", profile, Some("low-memory"));
        let version = self.code.within("Cargo.toml", "\nversion = \"", "\"");
        let service = proxy["environment"]["LOWTIDE_SERVICE_VERSION"].as_str();
        self.same(file, "LOWTIDE_SERVICE_VERSION", service, Some(&*version));
        let patience = self.seconds(file, text_of(&proxy["stop_grace_period"]));
        let end = self.image_end_s();
        let what = format!("stop_grace_period {patience} s: expected more than {end} s");
        self.holds(file, end < patience, &what);
    }

    /// Checks that Prometheus in the Compose file finds the proxy.
    fn check_watching(&self) {
        let file = "deploy/prometheus.yml";
        let (compose, prometheus) = (&self.yaml("compose.yaml")[0], &self.yaml(file)[0]);
        let targets = &prometheus["scrape_configs"][0]["static_configs"][0]["targets"];
        let proxy = format!("proxy:{OPERATORS}");
        self.same(file, "targets", strings(targets), vec![&*proxy]);
        // The name by which it is scraped; the answer to any other is 403.
        let hosts = compose["services"]["proxy"]["environment"]["PROXY_HOSTS"].as_str();
        self.same("compose.yaml", "PROXY_HOSTS", hosts, Some("proxy"));
        let alerts = &prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"];
        self.same(file, "alertmanagers", strings(alerts), vec!["alertmanager:9093"]);
        let mounted = strings(&compose["services"]["prometheus"]["volumes"]).join("\n");
        for rules in strings(&prometheus["rule_files"]) {
            let is_mounted = mounted.contains(&format!(":/etc/prometheus/{rules}:ro"));
            self.holds("compose.yaml", is_mounted, &format!("{rules} is not mounted"));
        }
        let file = "dashboards/provisioning/datasources/prometheus.yml";
        let source = &self.yaml(file)[0]["datasources"][0];
        self.same(file, "url", source["url"].as_str(), Some("http://prometheus:9090"));
        // Rates are made of it.
        let interval = &prometheus["global"]["scrape_interval"];
        self.same(file, "timeInterval", &source["jsonData"]["timeInterval"], interval);
        let file = "dashboards/provisioning/dashboards/lowtide.yml";
        let boards = &self.yaml(file)[0]["providers"][0];
        let folder = text_of(&boards["options"]["path"]);
        let grafana = strings(&compose["services"]["grafana"]["volumes"]).join("\n");
        let is_mounted = grafana.contains(&format!("./dashboards:{folder}:ro"));
        self.holds("compose.yaml", is_mounted, &format!("dashboards are not at {folder:?}"));
        let file = "deploy/alertmanager.yml";
        let alerts = &self.yaml(file)[0];
        self.same(file, "receiver", &alerts["route"]["receiver"], &alerts["receivers"][0]["name"]);
    }

    /// The pod has one limit, few rights, and time to end.
    fn check_pod(&self) {
        let file = "deploy/kubernetes.yaml";
        let documents = self.yaml(file);
        let kinds: Vec<_> = documents.iter().filter_map(|one| one["kind"].as_str()).collect();
        self.same(file, "kinds", kinds, vec!["Deployment", "Service", "PodMonitor"]);
        let pod = &documents[0]["spec"]["template"]["spec"];
        // Or it would set `LOWTIDE_*` for a service of that name.
        for name in ["enableServiceLinks", "automountServiceAccountToken"] {
            self.same(file, name, pod[name].as_bool(), Some(false));
        }
        let context = &pod["securityContext"];
        self.same(file, "runAsNonRoot", context["runAsNonRoot"].as_bool(), Some(true));
        self.same(file, "runAsUser, as in the image", context["runAsUser"].as_i64(), Some(USER));
        let proxy = &pod["containers"][0];
        // Bug: an image without a registry was docker.io's latest.
        let image = text_of(&proxy["image"]);
        let tag = image.split_once('/').and_then(|(_, name)| name.split_once(':'));
        let version = self.code.within("Cargo.toml", "\nversion = \"", "\"");
        self.same(file, "image", tag, Some(("lowtide-proxy", &version)));
        let is_pushed = self.text(GUIDE).contains(&format!("docker push {image}\n"));
        self.holds(GUIDE, is_pushed, &format!("no docker push {image}"));
        let resources = &proxy["resources"];
        let limits = &resources["limits"]["memory"];
        self.same(file, "memory requested", &resources["requests"]["memory"], limits);
        let has_cpu = resources["requests"]["cpu"].as_str().is_some();
        self.holds(file, has_cpu, "no CPU is requested");
        let rights = &proxy["securityContext"];
        let is_fixed = rights["readOnlyRootFilesystem"].as_bool();
        self.same(file, "readOnlyRootFilesystem", is_fixed, Some(true));
        let may_rise = rights["allowPrivilegeEscalation"].as_bool();
        self.same(file, "allowPrivilegeEscalation", may_rise, Some(false));
        self.same(file, "drop", strings(&rights["capabilities"]["drop"]), vec!["ALL"]);
        let env = |name| {
            let all = proxy["env"].as_vec()?.iter();
            all.into_iter().find(|one| one["name"].as_str() == Some(name))?["value"].as_str()
        };
        self.same(file, "LOWTIDE_PROFILE", env("LOWTIDE_PROFILE"), Some("low-memory"));
        let service = env("LOWTIDE_SERVICE_VERSION");
        self.same(file, "LOWTIDE_SERVICE_VERSION, as the image", service, Some(&*version));
        let [drain, grace] = ["PROXY_DRAIN", "PROXY_GRACE"]
            .map(|name| self.seconds(file, env(name).unwrap_or_default()));
        // The image has no shell to sleep in.
        let before = proxy["lifecycle"]["preStop"]["sleep"]["seconds"].as_i64();
        self.holds(file, before.is_some(), "no sleep in preStop");
        let end = before.unwrap_or_default().unsigned_abs() + drain + grace + END_S;
        let patience = pod["terminationGracePeriodSeconds"].as_i64().unwrap_or_default();
        let what = format!("terminationGracePeriodSeconds {patience}: expected more than {end}");
        self.holds(file, end < patience.unsigned_abs(), &what);
    }

    /// Clients reach one port of the pod, and operators another.
    fn check_pod_ports(&self) {
        let file = "deploy/kubernetes.yaml";
        let documents = self.yaml(file);
        let [deployment, service, monitor] = documents.as_slice() else { return };
        let template = &deployment["spec"]["template"];
        let labels = &template["metadata"]["labels"];
        let proxy = &template["spec"]["containers"][0];
        let (clients, operators) = (&proxy["ports"][0], &proxy["ports"][1]);
        for (port, expected) in [(clients, PORT), (operators, OPERATORS)] {
            let is = port["containerPort"].as_i64();
            self.same(file, "containerPort", is, expected.parse().ok());
        }
        // A probe never fails for pressure, and clients do not keep it waiting.
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            let asks = &proxy[probe]["httpGet"];
            self.same(file, probe, asks["path"].as_str(), Some("/healthz"));
            self.same(file, probe, &asks["port"], &operators["name"]);
        }
        let chosen = &monitor["spec"];
        self.same(file, "labels of the monitor", &chosen["selector"]["matchLabels"], labels);
        self.same(file, "labels of the service", &service["spec"]["selector"], labels);
        let scraped = &chosen["podMetricsEndpoints"][0];
        self.same(file, "the scraped port", &scraped["port"], &operators["name"]);
        self.same(file, "the scraped path", scraped["path"].as_str(), Some("/metrics"));
        // Bug: the service published /memory, /metrics and verbs.
        let published = service["spec"]["ports"].as_vec().map_or(0, Vec::len);
        self.same(file, "published ports", published, 1);
        let target = &service["spec"]["ports"][0]["targetPort"];
        self.same(file, "the published port", target, &clients["name"]);
    }

    /// The unit limits memory, gives no rights, and waits for the end.
    fn check_unit(&self) {
        let file = "deploy/lowtide-proxy.service";
        let unit = self.text(file);
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
            self.holds(file, unit.lines().any(|other| other == line), &format!("no {line}"));
        }
        let operators = set(unit, "PROXY_OPERATORS");
        self.same(file, "PROXY_OPERATORS", operators, &*format!("127.0.0.1:{OPERATORS}"));
        // The crate would take MemoryHigh for the limit, and it reads /proc/meminfo.
        for line in ["\nMemoryHigh=", "\nProcSubset="] {
            self.holds(file, !unit.contains(line), &format!("{line:?} is set"));
        }
        let patience = set(unit, "TimeoutStopSec").parse().unwrap_or(0);
        let [drain, grace] =
            ["PROXY_DRAIN", "PROXY_GRACE"].map(|name| self.seconds(file, set(unit, name)));
        let end = drain + grace + END_S;
        let what = format!("TimeoutStopSec {patience}: expected more than {end}");
        self.holds(file, end < patience, &what);
    }

    /// The flight recorder and the heap profiler write into a volume that outlives the process,
    /// since the rest is read-only.
    fn check_state(&self) {
        let image = self.text("Dockerfile");
        let has_volume = image.contains(&format!("\nVOLUME {STATE}\n"));
        self.holds("Dockerfile", has_volume, &format!("no volume {STATE}"));
        let opens = format!("\nchmod 777 \"$root{STATE}\"\n");
        let is_open = self.text("deploy/image-root").contains(&opens);
        self.holds("deploy/image-root", is_open, &format!("no {opens:?}"));

        let compose = &self.yaml("compose.yaml")[0]["services"]["proxy"];
        let volumes = strings(&compose["volumes"]);
        self.same("compose.yaml", "volumes", volumes, vec![&*format!("recording:{STATE}")]);

        let (manifests, unit) = ("deploy/kubernetes.yaml", "deploy/lowtide-proxy.service");
        let pod = &self.yaml(manifests)[0]["spec"]["template"]["spec"];
        let proxy = &pod["containers"][0];
        let (mount, volume) = (&proxy["volumeMounts"][0], &pod["volumes"][0]);
        self.same(manifests, "mountPath", mount["mountPath"].as_str(), Some(STATE));
        self.same(manifests, "volume", &mount["name"], &volume["name"]);
        // 32 MiB of profiles of a run, those of earlier ones, and the recording.
        let size = volume["emptyDir"]["sizeLimit"].as_str();
        self.same(manifests, "sizeLimit of the emptyDir", size, Some("64Mi"));

        for (variable, name) in WRITTEN {
            let expected = format!("{STATE}/{name}");
            self.same("Dockerfile", variable, set(image, variable), &*expected);
            let path = compose["environment"][variable].as_str();
            self.same("compose.yaml", variable, path, Some(&*expected));
            let mut variables = proxy["env"].as_vec().into_iter().flatten();
            let path = variables.find(|one| one["name"].as_str() == Some(variable));
            let path = path.and_then(|one| one["value"].as_str());
            self.same(manifests, variable, path, Some(&*expected));
            let text = self.text(unit);
            let path = format!("/var/lib/{}/{name}", set(text, "StateDirectory"));
            self.same(unit, variable, set(text, variable), &*path);
        }
    }

    /// Bug: `/memory` was shown at the clients' port, which forwards it to the upstream.
    fn check_ports(&self) {
        let pages = ["docs/OPERATING.md", GUIDE, "README.md", "src/service/page/page.html"];
        for page in pages {
            for (number, line) in self.text(page).lines().enumerate() {
                for path in ["/memory", "/metrics", "/readyz", "/healthz"] {
                    let is_wrong = line.contains(&format!(":{PORT}{path}"));
                    self.expect(!is_wrong, || format!("{page}:{}: {line}", number + 1));
                }
            }
        }
        let command = format!("curl -s localhost:{OPERATORS}/memory\n");
        let has_it = self.text("docs/OPERATING.md").contains(&command);
        self.holds("docs/OPERATING.md", has_it, &format!("no {command:?}"));
    }
}
