//! The program itself, in processes of its own: start, end on a signal, health check, and what it
//! says to bad options.
//!
//! This binary runs itself again with the arguments in a variable of the environment; in that
//! process `the_program` is the only test, and is the program. So nothing else needs to be built.
#![expect(unsafe_code, reason = "standard output is replaced with a C call")]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};

use lowtide::memory::Shutdown;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use super::support::{ask, get, post};
use super::wire::{Upstream, Wire, until, within};
use crate::cli::exit_code;

const ARGUMENTS: &str = "PROXY_TEST_ARGUMENTS";
const BETWEEN: char = '\u{1f}';
/// The failure of the program's standard output and standard error: `full` or `closed`.
const SINK: &str = "PROXY_TEST_SINK";

#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told that it is the program")]
#[expect(clippy::exit, reason = "it ends as the program does")]
fn the_program() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let arguments = arguments.split(BETWEEN).map(Into::into);
    if let Ok(sink) = std::env::var(SINK) {
        break_output(&sink);
    }
    std::process::exit(crate::cli::run("proxy", arguments).into());
}

/// From here on nothing can be written to standard output and standard error. Not before, since
/// the harness of tests writes there too, and ends if it cannot.
fn break_output(sink: &str) {
    let broken: OwnedFd = match sink {
        "full" => File::options().write(true).open("/dev/full").expect("a full disk").into(),
        "closed" => {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            writer.into()
        }
        other => panic!("{SINK}={other:?}: expected full or closed"),
    };
    for number in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: both descriptors are open, and nothing owns the number that is replaced.
        let replaced = unsafe { libc::dup2(broken.as_raw_fd(), number) };
        assert_eq!(replaced, number);
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    let joined = ["proxy"].iter().chain(arguments).copied().collect::<Vec<_>>();
    command
        .args(["--exact", "proxy::process::the_program", "--nocapture"])
        .env(ARGUMENTS, joined.join(&BETWEEN.to_string()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A program that ends by itself: its exit code, and what it wrote.
async fn run(mut command: Command) -> (Option<i32>, String) {
    let mut program =
        Program { child: command.spawn().expect("it starts"), at: None, operators: None };
    let code = program.code().await;
    let mut text = String::new();
    program.child.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
    program.child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
    (code, text)
}

/// A program that runs; it is killed when the test ends.
struct Program {
    child: Child,
    at: Option<SocketAddr>,
    operators: Option<SocketAddr>,
}

impl Program {
    /// Starts it on any port, and waits until it listens.
    async fn start(arguments: &[&str]) -> Self {
        let listen = ["--listen", "127.0.0.1:0"];
        Self::of(command(&[&listen, arguments].concat())).await
    }

    async fn of(mut command: Command) -> Self {
        let mut child = command.spawn().expect("it starts");
        let stdout = child.stdout.take().expect("piped");
        let find = tokio::task::spawn_blocking(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = String::new();
            while stdout.read_line(&mut line).expect("text") > 0 {
                if let Some((_, after)) = line.split_once("the proxy is listening address=") {
                    let mut parts = after.split([' ', '=']);
                    let at = parts.next().and_then(|at| at.parse().ok());
                    let operators = parts.nth(1).and_then(|at| at.parse().ok());
                    return (at, operators, Some(stdout));
                }
                line.clear();
            }
            (None, None, None)
        });
        // Made first: a program that does not come to listen is killed as well.
        let mut program = Self { child, at: None, operators: None };
        let (at, operators, stdout) = within("it listens", find).await.expect("no panic");
        program.child.stdout = stdout.map(BufReader::into_inner);
        program.at = at;
        program.operators = operators;
        assert!(program.at.is_some(), "it ended before it listened, or wrote no plain address");
        program
    }

    fn address(&self) -> SocketAddr {
        self.at.expect("it listens")
    }

    /// Returns the log after the line that it listens; the process has ended.
    fn rest_of_log(&mut self) -> String {
        let mut log = String::new();
        self.child.stdout.take().expect("piped").read_to_string(&mut log).expect("text");
        log
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success());
    }

    async fn code(&mut self) -> Option<i32> {
        let mut status = None;
        until("it ends", || {
            status = self.child.try_wait().expect("its status");
            status.is_some()
        })
        .await;
        status.and_then(|status| status.code())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn until_accepted(at: SocketAddr) {
    let mut look = tokio::time::interval(std::time::Duration::from_millis(5));
    let accepted = async {
        while TcpStream::connect(at).await.is_err() {
            look.tick().await;
        }
    };
    within("connections are accepted", accepted).await;
}

async fn until_refused(at: SocketAddr) {
    let mut look = tokio::time::interval(std::time::Duration::from_millis(5));
    let refused = async {
        while TcpStream::connect(at).await.is_ok() {
            look.tick().await;
        }
    };
    within("new connections are refused", refused).await;
}

#[tokio::test]
async fn a_signal_lets_what_is_under_way_end_and_takes_nothing_new() {
    for name in ["TERM", "INT"] {
        let upstream = Upstream::new().await;
        let mut program = Program::start(&["--upstream", &upstream.uri("").to_string()]).await;
        let mut client = Wire::connect(program.address()).await;
        client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
        let mut at = upstream.accept().await;
        at.request().await;
        program.signal(name);
        until_refused(program.address()).await;
        at.send("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nstill ").await;
        at.send("yes").await;
        let answer = client.answer().await;
        assert_eq!((answer.text().as_str(), answer.whole), ("still yes", true), "{name}");
        assert_eq!(program.code().await, Some(0), "{name}");
        let log = program.rest_of_log();
        assert!(log.contains("all_requests_ended=true"), "{name}: {log}");
    }
}

/// The bug: at a signal idle connections were closed at once, and with them the requests that their
/// clients were just sending.
#[tokio::test]
async fn a_kept_connection_lost_its_next_request_at_the_end() {
    let mut program = Program::start(&["--drain", "1h"]).await;
    let at = program.address();
    let ask = "GET / HTTP/1.1\r\nhost: here\r\n\r\n";
    let mut kept = Vec::new();
    for _ in 0..20 {
        let mut client = Wire::connect(at).await;
        client.send(ask).await;
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.header("connection")), (200, None));
        kept.push(client);
    }
    program.signal("TERM");
    let mut look = tokio::time::interval(std::time::Duration::from_millis(5));
    let ready = async {
        loop {
            // On connections of their own: new ones are still accepted.
            let ready = get(at, "/readyz").await;
            if ready.status() == 503 {
                return ready;
            }
            look.tick().await;
        }
    };
    let ready = within("it is not ready any more", ready).await;
    assert_eq!(ready.json()["ending"], true);
    assert_eq!(get(at, "/healthz").await.status(), 200);
    for mut client in kept {
        client.send(ask).await;
        let answer = client.answer().await;
        assert_eq!(answer.status(), 200, "{answer:?}");
        assert_eq!(answer.header("connection").as_deref(), Some("close"));
        assert!(client.is_closed().await);
    }
    program.signal("TERM"); // a second one ends the wait
    assert_eq!(program.code().await, Some(0));
    let log = program.rest_of_log();
    assert!(log.contains("all_requests_ended=true"), "{log}");
}

/// The bug: a client's broken request was in the log as `upstream failed`.
#[tokio::test]
async fn a_clients_fault_was_logged_as_the_upstreams() {
    let upstream = Upstream::new().await;
    let to = upstream.uri("").to_string();
    let mut command = command(&["--listen", "127.0.0.1:0", "--upstream", &to]);
    command.env("RUST_LOG", "memory=debug,info");
    let mut program = Program::of(command).await;
    for broken in ["", "no size\r\n"] {
        let mut client = Wire::connect(program.address()).await;
        let head = "POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n";
        client.send(format!("{head}5\r\nshort\r\n")).await;
        let mut wire = upstream.accept().await;
        // Before the fault: a request that is known to be broken is not sent on.
        wire.head().await.expect("a head");
        client.send(broken).await;
        drop(client);
        let mut rest = Vec::new();
        let _ = within("the proxy closes", wire.0.read_to_end(&mut rest)).await;
    }
    program.signal("TERM");
    assert_eq!(program.code().await, Some(0));
    let log = program.rest_of_log();
    assert!(!log.contains("upstream failed"), "{log}");
    assert!(log.contains("DEBUG") && log.contains("client request ended early"), "{log}");
}

#[tokio::test]
async fn a_request_that_never_ends_does_not_hold_up_the_end() {
    let upstream = Upstream::new().await;
    let to = upstream.uri("").to_string();
    let mut program = Program::start(&["--upstream", &to, "--grace", "100ms"]).await;
    let mut client = Wire::connect(program.address()).await;
    client.send("GET / HTTP/1.1\r\nhost: here\r\n\r\n").await;
    let mut at = upstream.accept().await;
    at.request().await;
    program.signal("TERM");
    assert_eq!(program.code().await, Some(0));
    assert!(client.is_closed().await);
    let log = program.rest_of_log();
    assert!(log.contains("all_requests_ended=false"), "{log}");
}

#[tokio::test]
async fn a_taken_port_is_a_clear_error() {
    let program = Program::start(&[]).await;
    let taken = program.address().to_string();
    let (code, text) = run(command(&["--listen", &taken])).await;
    assert_eq!(code, Some(1));
    assert!(text.contains(&format!("proxy: cannot listen on {taken}")), "{text}");
    assert_eq!(get(program.address(), "/healthz").await.status(), 200, "the first goes on");
}

#[tokio::test]
async fn a_health_check_says_whether_it_is_well_and_if_not_why() {
    let program = Program::start(&[]).await;
    let at = program.address().to_string();
    assert_eq!(run(command(&["--listen", &at, "healthcheck"])).await.0, Some(0));
    let anywhere = format!("0.0.0.0:{}", program.address().port());
    assert_eq!(run(command(&["healthcheck", "--listen", &anywhere])).await.0, Some(0));
    drop(program);
    let (code, text) = run(command(&["healthcheck", "--listen", &at])).await;
    assert_eq!(code, Some(1));
    assert!(text.contains(&at) && text.contains("refused"), "{text}");
}

#[tokio::test]
async fn a_health_check_asks_where_operators_are_answered() {
    let aside = ["--operators", "127.0.0.2:0"];
    let program = Program::start(&aside).await;
    let (clients, operators) = (program.address(), program.operators.expect("it says where"));
    assert_ne!(clients, operators);
    assert_eq!(get(clients, "/healthz").await.status(), 404, "what the text service says");
    let at = operators.to_string();
    let (code, text) = run(command(&["healthcheck", "--operators", &at])).await;
    assert_eq!(code, Some(0), "{text}");
    let mut check = command(&["healthcheck"]);
    check.env("PROXY_LISTEN", clients.to_string()).env("PROXY_OPERATORS", &at);
    assert_eq!(run(check).await.0, Some(0));
    drop(program);
    let (code, text) = run(command(&["healthcheck", "--operators", &at])).await;
    assert_eq!(code, Some(1));
    assert!(text.contains(&at) && text.contains("refused"), "{text}");
    // The same address twice is one port.
    let both = Program::start(&["--operators", "127.0.0.1:0"]).await;
    assert_eq!(both.operators, both.at);
    assert_eq!(get(both.address(), "/healthz").await.status(), 200);
}

/// In this process the limit is the machine's, far above what it holds.
#[tokio::test]
async fn the_subcommand_fit_waits_until_the_proxy_fits_and_says_why_if_not() {
    let program = Program::start(&["--admin"]).await;
    let at = program.address().to_string();
    let fit = |arguments: &[&str]| run(command(&[&["fit", "--listen", &at], arguments].concat()));
    let (code, text) = fit(&["512Mi"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("fits in 512.0 MiB after"), "{text}");
    let figures = get(program.address(), "/memory").await;
    assert!(figures.text().contains("\"limit_source\": \"fit\""), "{figures:?}");
    // Less than a request that waits for the rest of its body may hold.
    let mut upload = Wire::connect(program.address()).await;
    let kind = "content-type: application/json\r\nhost: localhost";
    upload.send(format!("POST /embed HTTP/1.1\r\n{kind}\r\ncontent-length: 4194304\r\n\r\n")).await;
    upload.send(vec![b' '; 4_194_303]).await;
    let (code, text) = fit(&["6Mi", "--within", "3s"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("proxy: cannot fit in 6.0 MiB"), "{text}");
    drop(upload);
    let (code, text) = fit(&["none"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("no fit is in force: the limit is "), "{text}");
    for (arguments, expected) in [
        (&["512Mi", "--within", "1ms"] as &[&str], "400 Bad Request: cannot fit within 1ms"),
        (&["1Ki"], "cannot fit in 1.0 KiB: expected at least "),
    ] {
        let (code, text) = fit(arguments).await;
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(expected), "{text}");
    }
    for wrong in ["0", "half"] {
        let (code, text) = fit(&[wrong]).await;
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(wrong) && text.contains("or none"), "{text}");
    }
    drop(program);
    let (code, text) = fit(&["512Mi"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains(&at) && text.contains("refused"), "{text}");
}

/// Bug: one look that failed, such as one that got no place among the connections of a proxy that
/// makes room, ended the program with 1, as if the proxy did not fit.
#[tokio::test]
async fn the_subcommand_fit_looks_again_if_a_look_fails() {
    let proxy = Upstream::new().await;
    let at = proxy.uri("").authority().expect("an address").to_string();
    let answers = async {
        for answer in [
            Some(("202 Accepted", r#"{"admin_task": 7}"#)),
            None,
            Some(("200 OK", r#"{"admin_tasks": {"list": [{"id": 7, "state": "running"}]}}"#)),
            None,
            Some(("200 OK", r#"{"admin_tasks": {"list": [{"id": 7, "state": "done"}]}}"#)),
        ] {
            let mut wire = proxy.accept().await;
            wire.request().await;
            let Some((status, text)) = answer else { continue };
            let length = text.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}");
            wire.send(format!("{head}\r\nconnection: close\r\n\r\n{text}")).await;
        }
    };
    let fit = run(command(&["fit", "512Mi", "--listen", &at]));
    let ((), (code, text)) = tokio::join!(answers, fit);
    assert_eq!(code, Some(0), "{text}");
}

#[tokio::test]
async fn the_subcommand_fit_needs_admin_commands_and_their_token() {
    let program = Program::start(&[]).await;
    let at = program.address().to_string();
    let (code, text) = run(command(&["fit", "512Mi", "--listen", &at])).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("accepts no admin commands: expected PROXY_ADMIN=yes"), "{text}");
    let token = std::env::temp_dir().join(format!("lowtide-fit-{}", std::process::id()));
    std::fs::write(&token, "0123456789abcdef0123456789abcdef\n").expect("a file");
    let file = token.to_str().expect("UTF-8");
    let program = Program::start(&["--admin-token-file", file]).await;
    let at = program.address().to_string();
    let (code, text) = run(command(&["fit", "512Mi", "--listen", &at])).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("answered 401") && text.contains("token"), "{text}");
    let mut with_token = command(&["fit", "512Mi", "--listen", &at]);
    with_token.env("PROXY_ADMIN_TOKEN_FILE", &token);
    let (code, text) = run(with_token).await;
    assert_eq!(code, Some(0), "{text}");
    std::fs::remove_file(&token).expect("it is there");
}

/// The bug: `PROXY_ADMIN` took `true` and `false` alone, and `false` beside a token was a conflict.
#[tokio::test]
async fn a_switch_took_only_two_words_and_off_was_a_conflict() {
    let verb = "POST /memory/purge HTTP/1.1\r\nhost: localhost\r\nlowtide-admin: 1\r\n\r\n";
    let token = std::env::temp_dir().join(format!("lowtide-token-{}", std::process::id()));
    std::fs::write(&token, "0123456789abcdef0123456789abcdef\n").expect("a file");
    for (word, file, status) in
        [("yes", None, 202), ("1", None, 202), ("no", None, 404), ("false", Some(&token), 401)]
    {
        let mut command = command(&["--listen", "127.0.0.1:0"]);
        command.env("PROXY_ADMIN", word);
        if let Some(file) = file {
            command.env("PROXY_ADMIN_TOKEN_FILE", file);
        }
        let program = Program::of(command).await;
        let answer = ask(program.address(), verb).await;
        assert_eq!(answer.status(), status, "{word}: {answer:?}");
    }
    let mut both = command(&["--listen", "127.0.0.1:0"]);
    both.env("PROXY_ADMIN", "on").env("PROXY_ADMIN_TOKEN_FILE", &token);
    let (code, text) = run(both).await;
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("not both"), "{text}");
    std::fs::remove_file(&token).expect("it is there");
}

#[test]
fn exhausted_memory_has_an_exit_code_of_its_own_and_other_outstanding_work_is_a_failure() {
    let mut report = Shutdown::default();
    report.requests = 1;
    assert_eq!(exit_code(&Err(report.clone().into())), 1);
    report.exhausted = true;
    assert_eq!(exit_code(&Err(report.into())), 75);
    assert_eq!((exit_code(&Err("cannot listen".into())), exit_code(&Ok(()))), (1, 0));
}

#[test]
fn the_log_variable_takes_a_level_and_levels_of_single_targets() {
    use tracing::Level;
    let of = |text: &str| crate::cli::log_filter(text).map_err(|_| "a wrong level");
    for (text, ours, others) in [
        ("", Level::INFO, Level::INFO),
        ("debug", Level::DEBUG, Level::DEBUG),
        ("info,lowtide=trace,", Level::TRACE, Level::INFO),
        ("lowtide=warn, error", Level::WARN, Level::ERROR),
    ] {
        let filter = of(text).expect(text);
        for (target, level) in [("lowtide", ours), ("hyper", others)] {
            let is_on = |level: &Level| filter.would_enable(target, level);
            let on: Vec<_> = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE]
                .into_iter()
                .filter(is_on)
                .collect();
            assert_eq!(on.last(), Some(&level), "{text:?} for {target}");
        }
    }
    assert_eq!(of("lowtide=loud").err(), Some("a wrong level"));
}

/// The bug: on a terminal the log had colour codes whatever `NO_COLOR` said.
#[test]
fn a_terminal_had_colours_whatever_was_asked() {
    let is_coloured = |terminal, word: Option<&str>| {
        crate::cli::is_coloured(terminal, word.map(std::ffi::OsStr::new))
    };
    assert!(!is_coloured(true, Some("1")));
    assert!(is_coloured(true, None) && is_coloured(true, Some("")));
    assert!(!is_coloured(false, None));
}

#[tokio::test]
async fn a_health_check_does_not_wait_for_ever() {
    for start in ["", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n", "HTTP/1.1 503 Not\r\n\r\n"] {
        let mute = Upstream::new().await;
        let at = mute.address.to_string();
        let check = tokio::spawn(run(command(&["healthcheck", "--listen", &at])));
        let mut wire = mute.accept().await;
        wire.request().await;
        wire.send(start).await;
        if start.contains("503") {
            drop(wire);
        }
        let (code, text) = check.await.expect("no panic");
        assert_eq!(code, Some(1), "{start:?}: {text}");
        let reason = if start.contains("503") { "answered 503" } else { "did not answer within" };
        assert!(text.contains(reason), "{start:?}: {text}");
    }
}

#[tokio::test]
async fn bad_options_end_it_at_once_and_say_what_was_expected() {
    for (arguments, said) in [
        (&["--nonsense"] as &[&str], "--nonsense"),
        (&["--listen", "here"], "--listen"),
        (&["--weights", "1m"], "expected 64 MiB or more"),
        (&["--weights", "much"], "--weights"),
        (&["--grace", "soon"], "--grace"),
        (&["--idle-unload", "1 fortnight"], "--idle-unload"),
        (&["--seed", "x"], "--seed"),
        (&["--drain", "soon"], "--drain"),
        (&["--response-timeout", "5"], "--response-timeout"),
        (&["--upstream", "https://h"], "http://host:port"),
        (&["--upstream", "h:1"], "http://host:port"),
        (&["--upstream", "http://h/?q=1"], "http://host:port"),
        (&["--upstream", "http://u:p@h/"], "http://host:port"),
        (&["rubbish"], "rubbish"),
    ] {
        let (code, text) = run(command(arguments)).await;
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
        assert!(text.contains(said), "{arguments:?}: {text}");
    }
    let (code, text) = run(command(&["--help"])).await;
    assert_eq!(code, Some(0));
    assert!(text.contains("PROXY_LISTEN") && text.contains("PROXY_UPSTREAM"), "{text}");
}

#[tokio::test]
async fn bad_variables_end_it_at_once_and_each_is_named() {
    for (name, value, code_expected) in [
        ("LOWTIDE_TYPO", "1", 1),
        ("LOWTIDE_MEMORY_LIMIT", "lots", 1),
        ("PROXY_GRACE", "soon", 2),
        ("PROXY_ADMIN", "maybe", 2),
    ] {
        let mut command = command(&["--listen", "127.0.0.1:0"]);
        command.env(name, value);
        let (code, text) = run(command).await;
        assert_eq!(code, Some(code_expected), "{text}");
        let option = name.strip_prefix("PROXY_").map(|name| format!("--{}", name.to_lowercase()));
        let said = option.as_deref().unwrap_or(name);
        assert!(text.contains(said), "{text}");
    }
}

#[tokio::test]
async fn options_can_be_set_in_the_environment() {
    let upstream = Upstream::new().await;
    let mut command = command(&[]);
    command.env("PROXY_LISTEN", "127.0.0.1:0").env("PROXY_UPSTREAM", upstream.uri("").to_string());
    let program = Program::of(command).await;
    let serve = async {
        let mut wire = upstream.accept().await;
        wire.request().await;
        wire.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmine").await;
    };
    assert_eq!(tokio::join!(serve, get(program.address(), "/")).1.text(), "mine");
}

#[tokio::test]
async fn metrics_tell_of_heap_device_and_requests() {
    let program = Program::start(&[]).await;
    let body = r#"{"texts": ["ebb"]}"#;
    let answer = ask(program.address(), post("/embed", "application/json", body)).await;
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let mut text = String::new();
    let mut look = tokio::time::interval(std::time::Duration::from_millis(50));
    let published = async {
        while !text.contains("lowtide_device_committed_bytes") {
            look.tick().await;
            text = get(program.address(), "/metrics").await.text();
        }
    };
    within("metrics are published", published).await;
    let memory = get(program.address(), "/memory").await.json();
    assert_eq!(memory["resources"][0]["loaded"], true);
}

/// The bug: with the log on a full disk or a closed pipe the log's own error message panicked in
/// the request or admin task that logged: 289 of 400 answers were lost, and every admin task stayed
/// `running`.
#[tokio::test]
async fn a_log_that_could_not_be_written_lost_answers_and_left_admin_tasks_running() {
    for sink in ["full", "closed"] {
        // Of an address that no other test listens on, so that the port stays free.
        let free = std::net::TcpListener::bind("127.0.0.77:0").expect("a port");
        let at = free.local_addr().expect("an address");
        let dead = Upstream::new().await.uri("").to_string();
        drop(free);
        let listen = at.to_string();
        let mut command = command(&["--listen", &listen, "--upstream", &dead, "--admin"]);
        command.env(SINK, sink).env("RUST_LOG", "debug").stdout(Stdio::null());
        let child = command.spawn().expect("it starts");
        let mut program = Program { child, at: Some(at), operators: None };
        until_accepted(at).await;
        let purge = "POST /memory/purge HTTP/1.1\r\nhost: localhost\r\nlowtide-admin: 1\r\n\r\n";
        let embed = post("/embed", "application/json", r#"{"texts": ["ebb"]}"#);
        let mut statuses = std::collections::BTreeMap::new();
        for nth in 0..400 {
            let request = match nth % 4 {
                0 => purge.as_bytes(),
                1 => &embed,
                _ => b"GET / HTTP/1.1\r\nhost: here\r\n\r\n",
            };
            let mut wire = Wire::connect(at).await;
            wire.send(request).await;
            let answer = wire.head().await;
            *statuses.entry(answer.map(|answer| answer.status())).or_insert(0) += 1;
        }
        assert_eq!(statuses.get(&None), None, "{sink}: answers were lost: {statuses:?}");
        assert_eq!(statuses.get(&Some(502)), Some(&200), "{sink}: {statuses:?}");
        assert!(statuses.get(&Some(202)) >= Some(&10), "{sink}: {statuses:?}");
        let mut look = tokio::time::interval(std::time::Duration::from_millis(5));
        let ended = async {
            loop {
                look.tick().await;
                let memory = get(at, "/memory?with=admin_tasks").await.json();
                let admin_tasks =
                    memory["admin_tasks"]["list"].as_array().expect("admin_tasks").clone();
                if admin_tasks.iter().all(|admin_task| admin_task["state"] == "done") {
                    return admin_tasks.len();
                }
            }
        };
        assert!(within("every admin task is done", ended).await >= 10, "{sink}");
        program.signal("TERM");
        assert_eq!(program.code().await, Some(0), "{sink}");
    }
}
