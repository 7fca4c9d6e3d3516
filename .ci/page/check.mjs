// Opens the page at /memory of a real proxy under load in a real browser, and fails where anything
// of it does not hold: errors, fetches of anything else, rules of WCAG 2.1 AA, widths, keys.
//
//   node check.mjs PROXY CHROMIUM [FOLDER FOR PICTURES]
import { spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { open, until } from "./browser.mjs";

const [program, chromium, pictures] = process.argv.slice(2);
const BYTES_MAX = 60_000, FIRST_MAX_MS = 1000;
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"];
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const faults = [];
const fault = (text) => { faults.push(text); console.error(`fault: ${text}`); };
const expect = (holds, text) => { if (!holds) fault(text); };

// The proxy, with commands of this machine; it says where it listens.
const start = async () => {
  const child = spawn(program, ["--listen", "127.0.0.1:0", "--admin", "--idle-unload", "10m"],
    { env: { ...process.env, LOWTIDE_MEMORY_LIMIT: "512m", RUST_LOG: "info" }, stdio: ["ignore", "pipe", "inherit"] });
  let said = "";
  child.stdout.on("data", (text) => { said += text; });
  const port = await until("the proxy listens", () => {
    if (child.exitCode !== null) throw new Error(`the proxy ended with ${child.exitCode}: ${said}`);
    return said.match(/the proxy is listening.*?127\.0\.0\.1:(\d+)/)?.[1];
  });
  return { child, at: `http://127.0.0.1:${port}`, said: () => said };
};

// Requests without end, until it is told to stop: embeddings and what is forwarded.
const load = (at) => {
  let going = true, count = 0;
  const texts = Array.from({ length: 64 }, (_, nth) => `text ${nth} of some words `.repeat(20));
  const one = async (nth) => {
    while (going) {
      const embeds = (count++ + nth) % 3 > 0;
      const answer = await fetch(embeds ? `${at}/embed` : `${at}/words`, { method: "POST",
        headers: { "content-type": "application/json" },
        body: embeds ? JSON.stringify({ texts }) : texts.join("\n") }).catch(() => null);
      await answer?.arrayBuffer().catch(() => null);
      await new Promise((done) => setTimeout(done, 20));
    }
  };
  const all = Promise.all([0, 1, 2].map(one));
  return async () => { going = false; await all; };
};

// A tab at a width and in a colour scheme, with what goes wrong in it.
const visit = async (browser, at, width, scheme) => {
  const seen = { errors: [], requests: [] };
  const tab = await browser.tab((method, params) => {
    if (method === "Runtime.exceptionThrown") seen.errors.push(params.exceptionDetails.exception?.description ?? "an exception");
    if (method === "Runtime.consoleAPICalled" && ["error", "warning", "assert"].includes(params.type))
      seen.errors.push(params.args.map((arg) => arg.value ?? arg.description).join(" "));
    if (method === "Log.entryAdded" && params.entry.level !== "info" && params.entry.level !== "verbose")
      seen.errors.push(`${params.entry.text} ${params.entry.url ?? ""}`);
    if (method === "Network.requestWillBeSent") seen.requests.push(params.request.url);
  });
  for (const part of ["Page", "Runtime", "Log", "Network"]) await tab.call(`${part}.enable`);
  await tab.call("Emulation.setDeviceMetricsOverride",
    { width, height: width < 600 ? 780 : 900, deviceScaleFactor: 1, mobile: width < 600 });
  await tab.call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
  await tab.call("Page.addScriptToEvaluateOnNewDocument", { source: `
    window.checked = { shown: null, policy: [] };
    addEventListener("securitypolicyviolation", (event) =>
      checked.policy.push(event.violatedDirective + " " + event.blockedURI));
    new MutationObserver(() => {
      if (checked.shown === null && document.documentElement?.dataset.shown) requestAnimationFrame(() =>
        requestAnimationFrame(() => { checked.shown ??= performance.now(); }));
    }).observe(document, { attributes: true, subtree: true });` });
  await tab.call("Page.navigate", { url: `${at}/memory` });
  const first = await until("the first picture is drawn", () => tab.run("window.checked?.shown ?? null"));
  return { ...tab, seen, first };
};

const violations = async (tab, what) => {
  const found = await tab.run(`axe.run(document, { runOnly: ${JSON.stringify(RULES)}, preload: false })
    .then(({ violations }) => violations.map((one) => one.id + ": " + one.help + " " +
      one.nodes.map((node) => node.target + " " + (node.failureSummary ?? "")).slice(0, 3).join("; ")))`);
  found.forEach((one) => fault(`${what}: ${one}`));
  return found.length;
};

const looks = async (browser, at) => {
  let errors = 0, count = 0;
  const first = [];
  for (const width of [1280, 360]) for (const scheme of ["light", "dark"]) {
    const what = `${width} px, ${scheme}`;
    const tab = await visit(browser, at, width, scheme);
    first.push(tab.first);
    await until("three polls were answered", () => tab.seen.requests.length > 3);
    const wide = await tab.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]");
    expect(wide[0] <= wide[1], `${what}: the page is ${wide[0]} px wide in ${wide[1]}`);
    const policy = await tab.run("checked.policy");
    const others = tab.seen.requests.filter((url) => !url.startsWith(`${at}/memory`) && !url.startsWith("data:"));
    expect(others.length === 0, `${what}: fetched ${others}`);
    for (const error of [...tab.seen.errors, ...policy]) fault(`${what}: ${error}`);
    errors += tab.seen.errors.length + policy.length;
    expect(await tab.run(`[...document.querySelectorAll("path.live")].every((path) => path.getAttribute("d"))`),
      `${what}: a chart is empty`);
    expect(await tab.run("document.querySelectorAll('canvas').length > 0"), `${what}: no map is drawn`);
    if (pictures) {
      const { data } = await tab.call("Page.captureScreenshot", { captureBeyondViewport: true, format: "png" });
      writeFileSync(`${pictures}/page-${width}-${scheme}.png`, Buffer.from(data, "base64"));
    }
    await tab.run(axe);
    count += await violations(tab, what);
    await tab.run("document.querySelectorAll('details').forEach((details) => { details.open = true; })");
    await until("a table of figures is filled", () => tab.run("document.querySelectorAll('details table tbody tr').length > 2"));
    count += await violations(tab, `${what}, all open`);
    const opened = await tab.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]");
    expect(opened[0] <= opened[1], `${what}, all open: the page is ${opened[0]} px wide in ${opened[1]}`);
    await tab.close();
  }
  return { errors, count, first };
};

// Each command, by keys alone: the focus comes to its button, shows, and stays there.
const keys = async (browser, at) => {
  const tab = await visit(browser, at, 1280, "light");
  const focused = () => tab.run("document.activeElement?.innerText.replace(/\\s+/g, ' ').trim() ?? ''");
  const go = async (name) => {
    for (let nth = 0; nth < 80; nth++) {
      if ((await focused()) === name) return true;
      await tab.key("Tab", 9);
    }
    fault(`no key leads to the button ${name}`);
    return false;
  };
  const commands = [["Pause", null], ["Resume", null], ["Trim embedder", "trim embedder: done"],
    ["Sleep embedder", "sleep embedder: done"], ["Wake embedder", "wake embedder: done"],
    ["Unload embedder", "unload embedder: done"],
    ["Purge heap and arenas", "purge: done"]];
  for (const [nth, [name, outcome]] of commands.entries()) {
    if (!(await go(name))) continue;
    const ring = await tab.run("(({ outlineStyle, outlineWidth }) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))");
    expect(ring[0] !== "none" && parseFloat(ring[1]) >= 2, `the focus on ${name} does not show: ${ring}`);
    if (nth % 2) await tab.key("Enter", 13, "\r"); else await tab.key(" ", 32, " ");
    if (!outcome) continue;
    await until(`${name} is done`, () => tab.run(`document.getElementById("did").textContent.includes(${JSON.stringify(outcome)})`), 10_000)
      .catch(async (error) => fault(`${error.message}; the page says ${await tab.run("document.getElementById('did').textContent")}`));
    const kept = await tab.run("document.activeElement?.tagName");
    expect(kept === "BUTTON", `the focus left ${name} for ${kept}`);
  }
  // Nobody looks: nothing is asked for.
  const hide = (hidden) => tab.run(`Object.defineProperty(document, "hidden", { value: ${hidden}, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"))`);
  await hide(true);
  await new Promise((done) => setTimeout(done, 500));
  const before = tab.seen.requests.length;
  await new Promise((done) => setTimeout(done, 2500));
  expect(tab.seen.requests.length === before, "the page asks while it is hidden");
  await hide(false);
  await until("the page asks again", () => tab.seen.requests.length > before);
  for (const error of tab.seen.errors) fault(`with keys: ${error}`);
  return tab;
};

// Where the service says that the map is dear, the page asks for it that much less often, and for
// the figures as ever.
const seldom = async (browser, at) => {
  const tab = await browser.tab(() => {});
  for (const part of ["Page", "Runtime"]) await tab.call(`${part}.enable`);
  await tab.call("Page.addScriptToEvaluateOnNewDocument", { source: `
    window.asked = [];
    const real = window.fetch;
    window.fetch = async (address, options) => {
      asked.push(String(address).includes("map"));
      const answer = await real(address, options), told = await answer.json();
      for (const of of told.map ?? []) of.again_in_seconds = 3;
      return new Response(JSON.stringify(told), { status: answer.status });
    };` });
  await tab.call("Page.navigate", { url: `${at}/memory` });
  await until("seven polls were sent", () => tab.run("(window.asked ?? []).length >= 7"), 15_000);
  const asked = await tab.run("asked.slice(0, 7).map(Number).join('')");
  expect(asked === "1001001", `of seven polls these asked for the map: ${asked}, expected 1001001`);
  expect(await tab.run("[...document.querySelectorAll('figcaption')].some((one) => one.textContent.includes('updated every 3 s'))"),
    "the page does not say how old a map may be");
  await tab.close();
};

const browser = await open(chromium);
const proxy = await start();
try {
  const document_ = await fetch(`${proxy.at}/memory`, { headers: { accept: "text/html" } });
  const bytes = (await document_.arrayBuffer()).byteLength;
  expect(bytes <= BYTES_MAX, `the page has ${bytes} bytes: at most ${BYTES_MAX}`);
  const stop = load(proxy.at);
  await until("the model is loaded", async () =>
    (await (await fetch(`${proxy.at}/memory`)).json()).resources[0].loaded);
  const { errors, count, first } = await looks(browser, proxy.at);
  await stop();
  const slowest = Math.max(...first);
  expect(slowest <= FIRST_MAX_MS, `the first picture came after ${slowest.toFixed(0)} ms: at most ${FIRST_MAX_MS}`);
  await seldom(browser, proxy.at);
  const tab = await keys(browser, proxy.at);
  proxy.child.kill("SIGTERM");
  await until("the page says that nobody answers", () => tab.run("!document.getElementById('trouble').hidden"));
  console.log(`figure page.bytes ${bytes} bytes`);
  console.log(`figure page.first_picture_ms ${slowest.toFixed(0)} ms`);
  console.log(`figure page.console_errors ${errors} errors`);
  console.log(`figure page.violations ${count} violations`);
} finally {
  proxy.child.kill("SIGKILL");
  await browser.close();
}
if (faults.length) {
  console.error(`${faults.length} faults`);
  process.exitCode = 1;
}
