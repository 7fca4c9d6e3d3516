// Makes one page of a dashboard's JSON and the data that Prometheus has for it: everything is
// inside, so that the page asks nobody. Prints the size of its window.
//
//   node page.mjs DASHBOARD.json FOLDER_OF_UPLOT PAGE.html
//
// Drawn are what the dashboards here have: time series, single figures, states over time, tables,
// marks in time. What Grafana does beyond that is left out.
import { readFileSync, writeFileSync } from "node:fs";

const [file, uplot, page] = process.argv.slice(2);
const env = (name) => {
  if (!process.env[name]) throw new Error(`${name} is not set`);
  return process.env[name];
};
const [server, from, to] = ["LOWTIDE_PROMETHEUS", "LOWTIDE_FROM", "LOWTIDE_TO"].map(env);
const WIDTH = 1440, LINE = 30, GAP = 8, HEAD = 46;

// What the variables stand for when all is chosen; a range holds five scrapes.
const VARIABLES = { $__rate_interval: "5s", $__range: `${to - from}s`, $namespace: ".*", $job: ".*",
  $pod: ".*", $instance: ".*", $device: ".*" };
const replaced = (expr) =>
  Object.entries(VARIABLES).reduce((text, [name, value]) => text.replaceAll(name, value), expr);

async function series(expr) {
  const body = new URLSearchParams({ query: replaced(expr), start: from, end: to, step: "1" });
  const answer = await fetch(`${server}/api/v1/query_range`, { method: "POST", body });
  if (!answer.ok) throw new Error(`${expr}: ${answer.status} ${await answer.text()}`);
  return (await answer.json()).data.result;
}

const named = (format, labels) =>
  format.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? "").trim();

const dashboard = JSON.parse(readFileSync(file, "utf8"));
const panels = [];
for (const panel of dashboard.panels) {
  const lines = [];
  for (const target of panel.targets ?? []) {
    for (const { metric, values } of await series(target.expr)) {
      const points = new Map(values.map(([at, value]) => [Math.round(at), Number(value)]));
      lines.push({ name: named(target.legendFormat ?? "", metric), metric, points: [...points] });
    }
  }
  panels.push({ ...panel, lines });
}
const marks = [];
for (const { name, iconColor, expr } of dashboard.annotations.list) {
  for (const { values } of await series(expr)) {
    // One mark for each run of seconds in which something happened.
    let last = -Infinity;
    for (const [at] of values) {
      if (at - last > 1.5) marks.push({ name, color: iconColor, at });
      last = at;
    }
  }
}
const lines = Math.max(...panels.map(({ gridPos: { y, h } }) => y + h));
const read = (name) => readFileSync(`${uplot}/${name}`, "utf8");
const data = JSON.stringify({ title: dashboard.title, panels, marks, from, to, WIDTH, LINE, GAP, HEAD });
const draw = readFileSync(new URL("draw.js", import.meta.url), "utf8");
writeFileSync(page, `<!doctype html><meta charset="utf-8"><style>${read("uPlot.min.css")}
${readFileSync(new URL("draw.css", import.meta.url), "utf8")}</style><body>
<script>${read("uPlot.iife.min.js")}</script>
<script>const DATA = ${data.replaceAll("<", "\\u003c")};</script><script>${draw}</script>`);
console.log(`${WIDTH},${HEAD + lines * LINE + GAP}`);
