// Draws the panels of DATA. Colours and units are Grafana's names, as far as they are used here.
const COLORS = { green: "#73bf69", "light-green": "#96d98d", yellow: "#fade2a", orange: "#ff9830",
  red: "#f2495c", blue: "#5794f2", purple: "#b877d9" };
const PALETTE = ["#73bf69", "#fade2a", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff",
  "#ffa6b0", "#ca95e5", "#96d98d"];
const color = (name) => COLORS[name] ?? name;
const { panels, marks, WIDTH, LINE, GAP, HEAD } = DATA;
const FROM = Number(DATA.from), TO = Number(DATA.to);

function binary(value, unit) {
  const names = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < 3) (value /= 1024), at++;
  return `${Number(value.toPrecision(3))} ${names[at]}${unit}`;
}
function shown(value, unit) {
  if (value === null || Number.isNaN(value)) return "";
  const short = Number(value.toPrecision(3));
  switch (unit) {
    case "bytes": return binary(value, "");
    case "binBps": return binary(value, "/s");
    case "percentunit": return `${Number((100 * value).toPrecision(3))} %`;
    case "s": return Math.abs(value) < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${short} s`;
    case "cpm": return `${short}/min`;
    case "ops": case "reqps": return `${short}/s`;
    default: return String(short);
  }
}
const clock = (at) => `${Math.round(at - FROM)} s`;
const make = (parent, tag, name, text) => {
  const made = parent.appendChild(document.createElement(tag));
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};
const defaults = (panel) => panel.fieldConfig?.defaults ?? {};
const last = (line) => line.points.filter(([, value]) => !Number.isNaN(value)).at(-1)?.[1] ?? null;

function threshold(panel, value) {
  const steps = defaults(panel).thresholds?.steps ?? [];
  return color(steps.filter((step) => step.value === null || value >= step.value).at(-1)?.color ?? "#ccccdc");
}
function mapped(panel, value) {
  const state = (defaults(panel).mappings ?? [])[0]?.options?.[String(value)];
  return state && { text: state.text, color: color(state.color) };
}

// What overrides say of a series by its name.
function look(panel, name, nth) {
  const found = { color: PALETTE[nth % PALETTE.length], dash: [], fill: true };
  for (const { matcher, properties } of panel.fieldConfig?.overrides ?? []) {
    if (!new RegExp(matcher.options.slice(1, -1)).test(name)) continue;
    for (const { id, value } of properties) {
      if (id === "color") found.color = color(value.fixedColor);
      if (id === "custom.lineStyle") found.dash = [6, 5];
      if (id === "custom.fillOpacity" && value === 0) found.fill = false;
    }
  }
  return found;
}

function timeseries(box, panel, width, height) {
  const times = Array.from({ length: TO - FROM + 1 }, (_, at) => FROM + at);
  const data = [times], series = [{}], used = new Map();
  // Each line of a stack lies on the sum of those before it.
  const stacked = defaults(panel).custom?.stacking?.mode === "normal", sums = times.map(() => 0);
  panel.lines.forEach((line, nth) => {
    const points = new Map(line.points);
    data.push(times.map((at, nth) => {
      const value = points.get(at);
      if (value === undefined || Number.isNaN(value)) return null;
      return stacked ? (sums[nth] += value) : value;
    }));
    const style = look(panel, line.name, nth);
    // The second series of one look is told apart by its width.
    const again = used.get(style.color) ?? 0;
    used.set(style.color, again + 1);
    series.push({ stroke: style.color + (again ? "99" : ""), dash: again && !style.dash.length ? [2, 3] : style.dash,
      width: 1.5, fill: style.fill && !again && !stacked ? style.color + "14" : undefined, points: { show: false }, spanGaps: false });
    line.color = style.color;
    line.again = again;
  });
  // The first of a stack lies on the axis, and has no line below it to fill to.
  if (stacked && series[1]) series[1].fill = panel.lines[0].color + "90";
  const legend = document.createElement("div");
  legend.className = "legend";
  for (const line of panel.lines) {
    const entry = make(legend, "span");
    make(entry, "i").style.background = line.color + (line.again ? "99" : "");
    entry.append(line.name);
  }
  box.append(legend);
  const room = height - 30 - legend.offsetHeight;
  const unit = defaults(panel).unit;
  const axis = { stroke: "#9a9aa8", grid: { stroke: "#ffffff10", width: 1 }, ticks: { show: false }, font: "10px DejaVu Sans" };
  const highest = Math.max(0, ...data.slice(1).flat().filter((value) => value !== null));
  const steps = [1, 2, 2.5, 5, 10];
  const base = ["bytes", "binBps"].includes(unit) && highest >= 1024 ? 1024 ** Math.floor(Math.log(highest) / Math.log(1024)) : 1;
  const rough = (highest || 1) / base / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = steps.find((one) => one * power >= rough) * power * base;
  const top = Math.max(step, Math.ceil((highest * 1.04) / step) * step);
  const plot = new uPlot({
    width: width - 4, height: room, legend: { show: false }, cursor: { show: false }, padding: [6, 12, 0, 0],
    scales: { x: { time: false, range: [FROM, TO] }, y: { range: [0, top] } },
    axes: [{ ...axis, size: 22, splits: () => Array.from({ length: 9 }, (_, at) => FROM + at * 10).filter((at) => at <= TO), values: (_, splits) => splits.map(clock) },
      { ...axis, size: 62, splits: () => Array.from({ length: Math.round(top / step) + 1 }, (_, at) => at * step), values: (_, splits) => splits.map((value) => shown(value, unit)) }],
    series,
    bands: stacked ? panel.lines.map((line, nth) => ({ series: nth ? [nth + 1, nth] : [1, 0], fill: line.color + "90" })).slice(1) : undefined,
    hooks: { drawAxes: [(chart) => {
      const { ctx, bbox } = chart;
      for (const { at, color: name } of marks) {
        const x = chart.valToPos(at, "x", true);
        ctx.save();
        ctx.strokeStyle = color(name) + "b0";
        ctx.setLineDash([3, 3]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.restore();
      }
    }] },
  }, data, document.createElement("div"));
  box.insertBefore(plot.root, legend);
}

function states(box, panel, width, height) {
  const area = make(box, "div", "states");
  const left = 150, across = width - 18 - left, tall = Math.min(28, (height - 40) / Math.max(1, panel.lines.length));
  panel.lines.forEach((line, nth) => {
    const label = make(area, "label", "", line.name);
    label.style.top = `${nth * tall + 4}px`;
    let start = 0;
    const place = (at) => left + ((at - FROM) / (TO - FROM)) * across;
    for (let at = 1; at <= line.points.length; at++) {
      if (at < line.points.length && line.points[at][1] === line.points[start][1]) continue;
      const end = at < line.points.length ? line.points[at][0] : line.points[at - 1][0];
      const state = mapped(panel, line.points[start][1]) ?? { text: String(line.points[start][1]), color: "#5a6270" };
      const bar = make(area, "div", "", place(end) - place(line.points[start][0]) > 44 ? state.text : "");
      Object.assign(bar.style, { left: `${place(line.points[start][0])}px`, width: `${Math.max(1.5, place(end) - place(line.points[start][0]))}px`,
        top: `${nth * tall}px`, height: `${tall - 5}px`, background: state.color });
      start = at;
    }
  });
}

function stat(box, panel) {
  const row = make(box, "div", "stat");
  const many = panel.lines.length > 1;
  for (const line of panel.lines) {
    const value = last(line), state = mapped(panel, value), one = make(row, "div");
    const figure = make(one, "b", "", state?.text ?? shown(value, defaults(panel).unit));
    figure.style.color = state?.color ?? threshold(panel, value);
    if (many) figure.style.fontSize = "19px";
    make(one, "small", "", line.name);
  }
}

function table(box, panel) {
  const { excludeByName = {}, renameByName = {} } = panel.transformations?.[0]?.options ?? {};
  const rows = panel.lines.map((line) => [line, last(line)]).filter(([, value]) => value !== null);
  rows.sort(([, a], [, b]) => b - a);
  const names = Object.keys(rows[0]?.[0].metric ?? {}).filter((name) => !excludeByName[name]);
  const grid = make(box, "table"), head = make(grid, "tr");
  for (const name of names) make(head, "th", "", renameByName[name] ?? name);
  if (!excludeByName.Value) make(head, "th", "", renameByName.Value ?? "Value");
  for (const [line, value] of rows) {
    const row = make(grid, "tr");
    for (const name of names) make(row, "td", "", line.metric[name]);
    if (!excludeByName.Value) make(row, "td", "", shown(value, defaults(panel).unit));
  }
}

make(document.body, "h1", "", DATA.title);
const key = make(document.body, "div", "key");
for (const name of new Set(marks.map((mark) => mark.name))) {
  make(key, "i").style.color = color(marks.find((mark) => mark.name === name).color);
  key.append(name);
}
for (const panel of panels) {
  const { x, y, w, h } = panel.gridPos, column = (WIDTH - GAP) / 24;
  const width = w * column - GAP, height = h * LINE - GAP;
  const box = make(document.body, "div", panel.type === "row" ? "row" : "panel");
  Object.assign(box.style, { left: `${GAP + x * column}px`, top: `${HEAD + y * LINE}px`, width: `${width}px`, height: `${height}px` });
  make(box, panel.type === "row" ? "span" : "h2", "", panel.title);
  const draw = { timeseries, "state-timeline": states, stat, table }[panel.type];
  if (draw) draw(box, panel, width, height);
}
