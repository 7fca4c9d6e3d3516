//! Jobs that need a whole system: a kernel, a browser, Prometheus, mounts, Docker.

use std::path::Path;
use std::{env, fs};

use super::build::target;
use super::{Length, Outcome, Stop, skip};
use crate::run::{FOLDER, Run, cargo, has};
use crate::tree::{Tree, root};

/// Boots a kernel in a small virtual machine.
pub(super) fn limits(_: Length) -> Outcome {
    Ok(Run::new(".ci/limits/run").run()?)
}

/// The rules and their tests, by promtool.
pub(super) fn rules(_: Length) -> Outcome {
    if !has("promtool") {
        return skip("no promtool");
    }
    let tree = Tree::read(&root())?;
    let files = |folder: &str, end: &str| {
        let is_one = |name: &&str| {
            let inside = name.strip_prefix(folder).is_some_and(|rest| !rest.contains('/'));
            inside && name.ends_with(end)
        };
        let names = tree.files.iter().map(|file| file.name.as_str());
        names.filter(is_one).collect::<Vec<_>>().join(" ")
    };
    let rules = files("dashboards/", ".rules.yml");
    Run::new("promtool").words("check rules").words(&rules).run()?;
    let tests = files("dashboards/tests/", ".yml");
    Ok(Run::new("promtool").words("test rules").words(&tests).run()?)
}

/// The package of Kubernetes' schemas, and the version of Kubernetes against which the manifests
/// are validated.
const SCHEMAS: &str = "kubernetes-validate==1.37.0";
const KUBERNETES: &str = "1.37";

/// Validates the manifests against Kubernetes' schemas. It knows none of resources that others
/// define, such as a ScaledObject.
fn validate_manifests() -> Outcome {
    let installed = Run::new(".ci/venv").arg("kubernetes-validate").arg(SCHEMAS).output();
    let folder = installed.map_err(|why| Stop::Skipped(format!("no {SCHEMAS}: {why}")))?;
    let validate = Path::new(folder.trim()).join("bin/kubernetes-validate");
    let manifests = ["kubernetes", "envoy/kubernetes", "hpa", "endpoint-picker"];
    let files = manifests.map(|name| format!("deploy/{name}.yaml")).join(" ");
    Ok(Run::new(&validate).words("--strict -k").arg(KUBERNETES).words(&files).run()?)
}

/// The unit as systemd reads it, the manifests, the Compose file, the configuration of Prometheus.
pub(super) fn deployment(_: Length) -> Outcome {
    let root = root();
    let folder = root.join(FOLDER).join("deploy");
    let copy = |from: &str, name: &str, change: fn(String) -> String| {
        fs::create_dir_all(&folder)
            .and_then(|()| fs::read_to_string(root.join(from)))
            .and_then(|text| fs::write(folder.join(name), change(text)))
            .map_err(|error| format!("{from}: {error}"))
    };
    if has("systemd-analyze") {
        // The program is not installed here.
        copy("deploy/lowtide-proxy.service", "lowtide-proxy.service", |text| {
            let line = |line: &str| match line.strip_prefix("ExecStart=") {
                Some(_) => "ExecStart=/bin/true\n".to_owned(),
                None => format!("{line}\n"),
            };
            text.lines().map(line).collect()
        })?;
        let unit = folder.join("lowtide-proxy.service");
        Run::new("systemd-analyze").arg("verify").arg(&unit).run()?;
        let rated = Run::new("systemd-analyze")
            .words("security --offline=yes --no-pager --threshold=20")
            .arg(&unit);
        println!("{}", rated.output()?.lines().next_back().unwrap_or_default());
    } else {
        println!("skipped: no systemd-analyze");
    }
    if has("docker-compose") {
        for file in ["compose.yaml", "deploy/envoy/compose.yaml"] {
            Run::new("docker-compose").words(&format!("-f {file} config -q")).run()?;
        }
    } else {
        println!("skipped: no docker-compose");
    }
    match validate_manifests() {
        Err(Stop::Skipped(why)) if !super::is_set("CI") => println!("skipped: {why}"),
        outcome => outcome?,
    }
    if has("kubectl") {
        // It needs no cluster.
        Run::new("kubectl").words("kustomize deploy/envoy").output()?;
    } else {
        println!("skipped: no kubectl");
    }
    if !has("promtool") {
        return skip("no promtool");
    }
    copy("deploy/prometheus.yml", "prometheus.yml", |text| text)?;
    copy("dashboards/lowtide.rules.yml", "lowtide.rules.yml", |text| text)?;
    let config = folder.join("prometheus.yml");
    Ok(Run::new("promtool").words("check config").arg(config).run()?)
}

/// Every query of the dashboards, asked of a Prometheus that scrapes the proxy under load.
pub(super) fn dashboards(_: Length) -> Outcome {
    Ok(Run::new(".ci/dashboards/run").run()?)
}

/// The page at /memory of the proxy under load: errors, rules of WCAG, keys, widths.
pub(super) fn page(_: Length) -> Outcome {
    Ok(page_check(Build::Debug)?.run()?)
}

/// The build of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    Debug,
    Release,
}

/// Builds the proxy, and returns the command that checks its page.
pub(crate) fn page_check(build: Build) -> Result<Run, Stop> {
    if !has("chromium") || !has("npm") {
        return Err(Stop::Skipped("no chromium or no npm".to_owned()));
    }
    let install = "ci --prefix .ci/page --no-audit --no-fund --loglevel=error";
    Run::new("npm").words(install).run().map_err(Stop::Skipped)?;
    let (profile, folder) = match build {
        Build::Debug => ("dev", "debug"),
        Build::Release => ("release", "release"),
    };
    cargo(&format!("build --locked --profile {profile} --example proxy")).run()?;
    let proxy = target().join(folder).join("examples/proxy");
    Ok(Run::new("node").arg(".ci/page/check.mjs").arg(proxy).arg("chromium"))
}

/// Installs Envoy, and returns the path of its program.
pub(crate) fn envoy() -> Result<String, Stop> {
    let program = Run::new(".ci/install-envoy").output();
    let program = program.map_err(|_| Stop::Skipped("Envoy cannot be installed".to_owned()))?;
    Ok(program.trim().to_owned())
}

/// Each exits with 1 if a bound does not hold.
pub(super) fn demo(_: Length) -> Outcome {
    cargo("run --locked --release --example tide").run()?;
    Ok(cargo("run --locked --release --example comparison").run()?)
}

/// Load reports, read and used by gRPC's own client.
pub(super) fn grpc(_: Length) -> Outcome {
    Ok(Run::new(".ci/grpc").run()?)
}

/// The image's root, without Docker, read-only and under a limit that four times the load would
/// break.
pub(super) fn image(_: Length) -> Outcome {
    match Run::new(".ci/image").status()? {
        0 => Ok(()),
        2 => skip("no cgroups or mounts can be made here"),
        status => Err(format!(".ci/image: status {status}").into()),
    }
}

/// The image itself, under limits.
pub(super) fn docker(_: Length) -> Outcome {
    if env::var_os("DOCKER_HOST").is_none() && !has("docker") {
        return skip("no docker");
    }
    Ok(Run::new(".ci/docker").run()?)
}
