"use strict";
(() => {
  const EVERY_MS = 1000, PATIENCE_MS = 5000, BACKOFF_MAX_MS = 30000, SPAN_S = 300;
  const $ = (id) => document.getElementById(id);

  // Texts. Sizes as everywhere in lowtide: binary units, one decimal place.
  const size = (bytes) => {
    if (bytes === null || bytes === undefined) return "none";
    for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]])
      if (bytes >= unit) return `${(bytes / unit).toFixed(1)} ${name}`;
    return `${bytes} B`;
  };
  const bound = (bytes) => bytes === null ? "no limit" : size(bytes);
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
  const lasting = (seconds) => {
    const s = Math.ceil(seconds);
    return s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
  };
  const plural = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

  // Elements are changed only if their text changes, so that focus, selection and screen readers are
  // not disturbed.
  const make = (tag, given = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(given))
      if (value !== null && value !== undefined) element.setAttribute(name, value);
    element.append(...children.filter((child) => child !== null));
    return element;
  };
  const write = (element, text) => {
    if (element.textContent !== String(text)) element.textContent = text;
  };
  const SVG = "http://www.w3.org/2000/svg";
  const drawn = (tag, given = {}) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
    return element;
  };
  // Keeps one child for each item, by key and in order; existing children stay.
  const keep = (parent, items, keyOf, create, change) => {
    const there = new Map(), times = new Map();
    for (const child of [...parent.children]) there.set(child.dataset.key, child);
    let at = parent.firstElementChild;
    for (const item of items) {
      // Items with the same key get a child each; a shared child would be left over.
      let key = String(keyOf(item));
      const nth = times.get(key) || 0;
      times.set(key, nth + 1);
      if (nth) key += `#${nth}`;
      let child = there.get(key);
      if (child) there.delete(key);
      else { child = create(item); child.dataset.key = key; }
      if (child === at) at = at.nextElementSibling;
      else parent.insertBefore(child, at);
      change(child, item);
    }
    for (const child of there.values()) child.remove();
  };

  // A table; a column is [heading, value of a row, class]. A value may be an element to be filled.
  const table = (place, caption, columns, rows, keyOf, none) => {
    if (!place.firstChild) {
      const heads = columns.map(([name, , kind]) =>
        make("th", { scope: "col", class: kind }, name || make("span", { class: "unseen" }, "Actions")));
      place.append(
        make("p", { class: "none" }, none),
        make("div", { class: "scroll" }, make("table", { class: "cards" }, make("caption", {}, caption),
          make("thead", {}, make("tr", {}, ...heads)), make("tbody"))));
    }
    const [empty, scroll] = place.children;
    empty.hidden = rows.length > 0;
    scroll.hidden = rows.length === 0;
    keep(scroll.querySelector("tbody"), rows, keyOf,
      () => make("tr", {}, ...columns.map(([name, , kind], nth) => nth === 0
        ? make("th", { scope: "row", class: kind }) : make("td", { class: kind, "data-of": name }))),
      (line, row) => columns.forEach(([, value, ], nth) => {
        const cell = line.children[nth];
        const text = value(row, cell);
        if (text !== undefined) write(cell, text);
      }));
  };

  // The last minutes: live at the bottom, retained above it.
  const history = [];
  const COLUMNS = ["physical", "heap_live", "heap_retained"];
  const COLUMNS_OF_DEVICE = ["device_live", "device_retained"];
  // A build without device arenas reports no device.
  const sumOf = (device, of) => [...device.arenas, ...device.draining]
    .filter((arena) => arena.backend !== "pinned_host").reduce((all, arena) => all + of(arena), 0);
  const remember = (told) => {
    const columns = told.device ? [...COLUMNS, ...COLUMNS_OF_DEVICE] : COLUMNS;
    // A clock that was set back: later points are not drawn.
    while (history.length && history[history.length - 1].at >= told.at_seconds) history.pop();
    if (told.history) {
      history.length = 0;
      told.history.at_seconds.forEach((at, nth) => {
        while (history.length && history[history.length - 1].at >= at) history.pop();
        if (at >= told.at_seconds) return;
        const point = { at };
        for (const name of columns) point[name] = told.history[`${name}_bytes`][nth];
        history.push(point);
      });
    }
    history.push({
      at: told.at_seconds,
      physical: told.host.physical_bytes,
      heap_live: told.heap ? told.heap.live_bytes : 0,
      heap_retained: told.heap ? told.heap.retained_bytes : 0,
      ...(told.device ? {
        device_live: sumOf(told.device, (a) => Math.max(0, a.live_bytes - a.asleep_bytes)),
        device_retained: sumOf(told.device, (a) => a.retained_bytes),
      } : {}),
    });
    while (history.length > 2 * SPAN_S || (history.length && history[0].at < told.at_seconds - SPAN_S)) history.shift();
  };
  // The parts of the physical memory and the free rest: one bar for the whole limit.
  const PARTS = { requests: "running requests", resource: "resource", heap_live: "other live heap", thread_caches: "thread caches",
    fragmentation: "heap fragmentation", free_pages: "free heap pages", heap_metadata: "heap metadata", arena: "arena",
    offloaded: "sleeping arenas' contents", untracked: "untracked: C code, stacks, other processes", headroom: "free up to the limit" };
  const parts = (told) => {
    const { host } = told;
    const list = host.parts.map((part) => ({ ...part, text: PARTS[part.kind] + (part.name === null ? "" : ` ${part.name}`) }));
    if (host.headroom_bytes !== null) list.push({ kind: "headroom", name: null, bytes: host.headroom_bytes, text: PARTS.headroom });
    const whole = Math.max(1, list.reduce((all, part) => all + part.bytes, 0));
    const place = $("parts");
    if (!place.firstChild) place.append(
      make("p", { class: "none" }), make("div", { class: "stack", "aria-hidden": "true" }), make("ul", { class: "key parts" }));
    const [head, bar, key] = place.children;
    write(head, `${size(host.physical_bytes)} physical` + (host.limit_bytes === null ? ", no limit" : ` of ${bound(host.limit_bytes)} (${host.limit_source})`));
    const keyOf = (part) => `${part.kind}/${part.name}`;
    keep(bar, list, keyOf, (part) => make("span", { class: `part-${part.kind}` }),
      (piece, part) => { piece.style.width = `${100 * part.bytes / whole}%`; piece.title = `${part.text}: ${size(part.bytes)}`; });
    keep(key, list, keyOf, (part) => make("li", {}, make("span", { class: `swatch part-${part.kind}`, "aria-hidden": "true" }), make("span")),
      (item, part) => write(item.lastChild, `${part.text} ${size(part.bytes)}`));
  };
  const verdict = (told) => {
    const now = $("verdict"), bad = told.findings.some((one) => one.is_problem);
    write(now, told.verdict);
    now.className = `box verdict${bad ? " trouble" : ""}`;
    const others = told.findings.filter((one) => one.text !== told.verdict);
    keep($("findings"), others, (one) => one.about, () => make("li", { class: "wide" }), (item, one) => write(item, one.text));
  };

  const swatch = (kind, text) => make("li", {}, make("span", { class: `swatch of-${kind}`, "aria-hidden": "true" }), text);
  // Physical memory against the limit; bands are the times in which requests were rejected.
  const physical = (told) => {
    const place = $("physical");
    if (!place.firstChild) {
      const picture = drawn("svg", { class: "chart", viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img",
        "aria-label": "Physical memory over the last minutes against the limit; the figures are above" });
      picture.append(drawn("g"), drawn("path", { class: "physical" }), drawn("line", { class: "limit", x1: 0, x2: 300 }));
      place.append(make("figure", {}, make("div", { class: "axis" }, make("span"), make("span")), picture,
        make("div", { class: "axis" }, make("span"), make("span", {}, "now")),
        make("figcaption", {}, "Physical memory. The line is the limit; red bands are times with rejected requests.")));
    }
    const now = history[history.length - 1], limit = told.host.limit_bytes;
    const most = Math.max(1, ...history.map((point) => point.physical)), top = limit === null ? most : Math.max(most, limit);
    const span = Math.min(SPAN_S, Math.max(60, Math.ceil((now.at - history[0].at) / 60) * 60));
    const x = (at) => Math.max(0, 300 * (1 - (now.at - at) / span)).toFixed(1), y = (bytes) => (100 - 96 * bytes / top).toFixed(1);
    place.querySelector("path").setAttribute("d",
      `M${x(history[0].at)},100L${history.map((point) => `${x(point.at)},${y(point.physical)}`).join("L")}L300,100Z`);
    const line = place.querySelector("line");
    line.setAttribute("visibility", limit === null ? "hidden" : "visible");
    if (limit !== null) for (const end of ["y1", "y2"]) line.setAttribute(end, y(limit));
    const bands = told.events.filter((event) => event.kind === "reject" && event.at_seconds > now.at - span);
    keep(place.querySelector("g"), bands, (band) => `${band.since_seconds}/${band.about}`, () => drawn("rect", { class: "band", y: 0, height: 100 }),
      (rect, band) => { const from = x(band.since_seconds); rect.setAttribute("x", from); rect.setAttribute("width", Math.max(1, x(band.at_seconds) - from)); });
    const [high, present] = place.querySelector(".axis").children;
    write(high, limit === null ? `highest ${size(most)}` : `highest ${size(most)} of ${size(limit)}`);
    write(present, `now ${size(now.physical)}`);
    write(place.querySelectorAll(".axis")[1].firstChild, `${span / 60} min ago`);
  };
  const inside = (told) => {
    if (told.size_classes) table($("size_classes").lastElementChild, "A purge does not release this free space", [
      ["Size class", (row) => size(row.size_bytes), "number"],
      ["Live or cached blocks", (row) => row.blocks, "number"],
      ["Pages", (row) => size(row.held_bytes), "number"],
      ["Free in them", (row) => size(row.slack_bytes), "number"],
      ["Used", (row) => `${Math.round(100 * row.utilisation)} %`, "number"],
    ], told.size_classes, (row) => row.size_bytes, "jemalloc reports no size classes.");
    const of = told.mappings;
    if (of === undefined) return;
    const rows = of === null ? [] : [...of.files.map((file) => [file.path, file.resident_bytes]),
      ["C library's heap, live (address space)", of.c_heap_live_bytes], ["C library's heap, free", of.c_heap_idle_bytes],
      ["Stack of the main thread", of.main_stack_bytes],
      ["Anonymous: heap, arenas, stacks of threads", of.anonymous_bytes + of.program_break_bytes]];
    table($("mappings").lastElementChild, "Resident memory of this process by mapping, at most twenty seconds old", [
      ["Mapping", (row) => row[0], "wide"], ["Resident", (row) => size(row[1]), "number"],
    ], rows, (row) => row[0], "Not read yet, or the mappings cannot be read.");
  };
  // Answers that take longer to compute are requested while they are open.
  const OPENED = ["size_classes", "mappings", "leaks", "limit_advice", "last_exit", "device_processes"];
  const capital = (text) => text[0].toUpperCase() + text.slice(1);
  const PROFILER = { not_built: "not built in", off: "off", paused: "paused", active: "active, and waits for a second quiet time" };
  const sentence = (id, text) => write($(id).querySelector("p"), text);
  const over = (told) => {
    const { leaks, limit_advice: advice, device_processes: devices } = told;
    if (leaks) {
      const growth = leaks.growth_per_hour_bytes, last = leaks.quiet_live[leaks.quiet_live.length - 1];
      sentence("leaks", growth === null ? "No trend yet: it takes six quiet times, about a minute."
        : `Between quiet times live memory ${growth < 0 ? "falls" : "grows"} by ${size(Math.abs(growth))} an hour; now ${size(last.live_bytes)}.` +
          (leaks.suspects ? "" : ` Call sites are not known: the heap profiler is ${PROFILER[leaks.profiler] || leaks.profiler}.`));
      if (leaks.suspects) table($("leaks").lastElementChild, "Call sites that grew most between two quiet times, as sampled", [
        ["Growth", (row) => size(row.growth_bytes), "number"],
        ["Now", (row) => size(row.now_bytes), "number"],
        ["Call site, innermost first", (row) => row.frames.slice(0, 4).join(" < "), "wide"],
      ], leaks.suspects.list, (row) => row.frames.join(), "No call site grew.");
    }
    if (advice) {
      sentence("limit_advice", `${capital(advice.sentence)}.`);
      table($("limit_advice").lastElementChild, "Required memory and requests by hour; ?with=limit_advice&limit=256Mi reports one limit", [
        ["From", (row) => clock(row.start_seconds), "when"],
        ["Required, p99.9", (row) => size(row.required_p999_bytes), "number"],
        ["Required, most", (row) => size(row.required_max_bytes), "number"],
        ["Requests", (row) => row.requests, "number"],
        ["Rejected", (row) => row.rejected, "number"],
      ], advice.hours, (row) => row.start_seconds, "No hour is recorded yet.");
    }
    if (told.last_exit !== undefined) sentence("last_exit", told.last_exit ? `${capital(told.last_exit.summary)}.` +
      (told.last_exit.at_seconds === null ? "" : ` Last sample: ${clock(told.last_exit.at_seconds)}.`)
      : "Nothing is recorded: there is no flight recorder, or this is its first run.");
    if (devices) {
      const errors = devices.filter((of) => of.error).map((of) => `${of.device}: ${of.error}`);
      sentence("device_processes", errors.length ? errors.join("; ") : devices.length ? "As the driver lists them; unknown is not zero." : "No CUDA device is open.");
      const rows = devices.flatMap((of) => of.processes.map((process) => ({ device: of.device, ...process })));
      table($("device_processes").lastElementChild, "Processes on each device", [
        ["Process", (row) => `${row.pid} ${row.name === null ? "" : row.name}`, "wide"],
        ["Device", (row) => row.device, "wide"],
        ["Used", (row) => row.used_bytes === null ? "unknown" : size(row.used_bytes), "number"],
        ["This process", (row) => row.is_this_process === null ? "unknown" : row.is_this_process ? "yes" : "no"],
      ], rows, (row) => `${row.device}/${row.pid}`, "No process is listed.");
    } else if (told.managed && $("device_processes").open) sentence("device_processes", "This build has no CUDA.");
  };
  const chart = (place, what) => {
    const names = [`${what}_live`, `${what}_retained`];
    if (!place.firstChild) {
      const picture = drawn("svg", { class: "chart", viewBox: "0 0 300 100", preserveAspectRatio: "none",
        role: "img", "aria-label": `Live and retained bytes of the ${what} over the last minutes; the figures are in the table below` });
      picture.append(drawn("line", { x1: 0, x2: 300, y1: 50, y2: 50 }),
        drawn("path", { class: "retained" }), drawn("path", { class: "live" }));
      place.append(
        make("figure", {},
          make("div", { class: "axis" }, make("span"), make("span")), picture,
          make("div", { class: "axis" }, make("span"), make("span", {}, "now")),
          make("figcaption", {}, make("ul", { class: "key" }, swatch("live", "live"), swatch("retained", "retained")))),
        make("details", {}, make("summary", {}, `Figures of the ${what}`), make("div")));
    }
    const now = history[history.length - 1];
    const top = Math.max(1, ...history.map((point) => point[names[0]] + point[names[1]]));
    const span = Math.min(SPAN_S, Math.max(60, Math.ceil((now.at - history[0].at) / 60) * 60));
    const x = (point) => (300 * (1 - (now.at - point.at) / span)).toFixed(1);
    write(place.querySelectorAll(".axis")[1].firstChild, `${span / 60} min ago`);
    const area = (of) => {
      const line = history.map((point) => `${x(point)},${(100 - 96 * of(point) / top).toFixed(1)}`);
      return `M${x(history[0])},100L${line.join("L")}L${x(now)},100Z`;
    };
    place.querySelector("path.live").setAttribute("d", area((point) => point[names[0]]));
    place.querySelector("path.retained").setAttribute("d", area((point) => point[names[0]] + point[names[1]]));
    const [high, present] = place.querySelector(".axis").children;
    write(high, `highest ${size(top)}`);
    write(present, `live ${size(now[names[0]])}, retained ${size(now[names[1]])}`);
    const details = place.querySelector("details");
    if (!details.open && details.lastChild.firstChild) return;
    const seen = new Set();
    const rows = [...history].reverse().filter((point) => {
      const half = Math.floor(point.at / 30);
      return !seen.has(half) && seen.add(half);
    });
    table(details.lastChild, `The ${what}, each half minute`, [
      ["Time", (point) => clock(point.at), "when"],
      ["Live", (point) => size(point[names[0]]), "number"],
      ["Retained", (point) => size(point[names[1]]), "number"],
    ], rows, (point) => Math.floor(point.at / 30), "No figures yet.");
  };

  // Layout of the arenas.
  const KINDS = ["live", "pending", "holes", "idle", "asleep", "bare"];
  const parted = (cell, live, pending, active, idle) => {
    const backed = Math.min(live, active), asleep = live - backed;
    const free = Math.max(0, active - backed);
    const waits = Math.min(pending, free);
    return { live: backed, pending: waits, holes: free - waits, idle, asleep,
      bare: Math.max(0, cell - active - idle - asleep) };
  };
  // Cells in order. A short gap is drawn as bare cells, a long one as a break.
  const BARE_MAX = 8, BREAK = null;
  const cellsOf = (region, asleep) => {
    const list = [];
    let next = region.cells.length ? region.cells[0][0] : 0;
    for (const [first, times, ...bytes] of region.cells) {
      const bare = first - next;
      if (bare > BARE_MAX) list.push(BREAK);
      else for (let nth = 0; nth < bare; nth++) list.push(parted(region.cell_bytes, 0, 0, 0, 0));
      const parts = parted(region.cell_bytes, ...bytes);
      if (asleep) { parts.asleep += parts.live; parts.live = 0; }
      for (let nth = 0; nth < times; nth++) list.push(parts);
      next = first + times;
    }
    return list;
  };
  const map = (canvas, region, cells) => {
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (!width) return;
    const across = Math.min(Math.max(cells.length, 48), Math.max(48, Math.floor(width / 4)));
    const rows = Math.ceil(cells.length / across), high = rows > 4 ? 16 : 26, gap = 3;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(rows * (high + gap) * scale);
    canvas.style.height = `${rows * (high + gap)}px`;
    const style = getComputedStyle(document.documentElement), pen = canvas.getContext("2d");
    const colour = Object.fromEntries([...KINDS, "soft"].map((kind) => [kind, style.getPropertyValue(`--${kind}`)]));
    pen.scale(scale, scale);
    const step = width / across;
    cells.forEach((parts, nth) => {
      const x = (nth % across) * step, row = Math.floor(nth / across) * (high + gap);
      if (parts === BREAK) {
        pen.fillStyle = colour.soft;
        for (const part of [.25, .5, .75]) pen.fillRect(x + step / 2 - 1, row + high * part - 1, 2, 2);
        return;
      }
      let y = row + high;
      for (const kind of KINDS) {
        const tall = high * parts[kind] / region.cell_bytes;
        if (tall <= 0) continue;
        pen.fillStyle = colour[kind];
        pen.fillRect(x, y - tall, Math.max(1, step - (step > 3 ? .5 : 0)), tall);
        y -= tall;
      }
    });
  };
  const arenaHead = (arena, drains) => {
    const state = drains ? "draining (replaced)" : arena.state;
    const leases = arena.leases ? `, ${plural(arena.leases, "lease")}` : "";
    const limit = arena.limit_bytes === null ? "" : ` of ${size(arena.limit_bytes)}`;
    return `${state}, ${arena.backend}: live ${size(arena.live_bytes)}, retained ${size(arena.retained_bytes)}, ` +
      `committed ${size(arena.committed_bytes)}${limit}${leases}`;
  };
  const arenas = (told) => {
    const list = [...told.device.arenas.map((arena) => ({ arena, drains: false })),
      ...told.device.draining.map((arena) => ({ arena, drains: true }))];
    // The map lists the same arenas, in the order in which they were opened; the name of a draining
    // arena may occur twice.
    const maps = new Map();
    for (const of of lastMaps) maps.set(of.arena, [...(maps.get(of.arena) || []), of]);
    const names = list.map(({ arena, drains }) => `${drains}/${arena.name}`).join();
    if (mapped !== null && names !== mapped) mapsAt = 0;
    mapped = names;
    const items = list.map(({ arena, drains }, nth) => ({ arena, drains, nth,
      map: drains ? (maps.get(arena.name) || []).shift() : (maps.get(arena.name) || []).pop() }));
    const place = $("arenas");
    if (!place.firstChild) place.append(make("p", { class: "none" }, "No arena is open."), make("div"));
    place.firstChild.hidden = items.length > 0;
    keep(place.lastChild, items, (item) => `${item.drains ? item.nth : ""}/${item.arena.name}`, (item) => {
      const head = make("div", { class: "head" }, make("h3", {}, item.arena.name), make("p"));
      return make("article", { class: "arena", "aria-label": `Arena ${item.arena.name}` }, head,
        make("div", { class: "maps" }),
        make("details", {}, make("summary", {}, `Figures of ${item.arena.name}`), make("div")));
    }, (article, item) => {
      write(article.querySelector("p"), arenaHead(item.arena, item.drains));
      commandsOf(article.querySelector(".head"), item.drains ? [] : [
        [0, "trim", "arena", item.arena.name, "Trim"],
        [1, ...(item.arena.state === "asleep" ? ["wake", "arena", item.arena.name, "Wake"]
          : ["sleep", "arena", item.arena.name, "Sleep"])],
      ]);
      const regions = item.map ? item.map.regions.filter((region) => region.cells.length) : [];
      keep(article.querySelector(".maps"), regions, (region) => region.region, (region) =>
        make("figure", { class: "region" }, make("canvas", { role: "img",
          "aria-label": `Map of the ${region.region} region of ${item.arena.name}; the sums are in the table below` }),
        make("figcaption")), (figure, region) => {
        const cells = cellsOf(region, item.arena.state === "asleep");
        map(figure.firstChild, region, cells);
        write(figure.lastChild, `${region.region}: ${plural(region.blocks, "block")}; each cell covers ` +
          `${size(region.cell_bytes)} of addresses` +
          (cells.includes(BREAK) ? "; three dots mark a long stretch without memory" : "") +
          (item.map.again_in_seconds > 1 ? `; updated every ${lasting(item.map.again_in_seconds)}` : ""));
      });
      const details = article.lastChild;
      if (!details.open && details.lastChild.firstChild) return;
      const sums = regions.map((region) => {
        const sum = { region: region.region, blocks: region.blocks };
        for (const kind of KINDS) sum[kind] = 0;
        for (const parts of cellsOf(region, item.arena.state === "asleep").filter((one) => one !== BREAK))
          for (const kind of KINDS) sum[kind] += parts[kind];
        return sum;
      });
      table(details.lastChild, `Layout of ${item.arena.name}, by region`, [
        ["Region", (sum) => sum.region],
        ["Blocks", (sum) => sum.blocks, "number"],
        ...KINDS.map((kind) => [kind[0].toUpperCase() + kind.slice(1), (sum) => size(sum[kind]), "number"]),
      ], sums, (sum) => sum.region, "No memory is committed.");
    });
  };

  const tiles = (told) => {
    const { host, heap, device, requests } = told;
    const shed = Object.values(requests.rejected).reduce((all, count) => all + count, 0);
    const level = device ? device.budget.level : "none";
    const list = [
      ["Pressure", host.budget.level, level === "none" ? "" : `device: ${level}`],
      ["Physical", size(host.physical_bytes), host.limit_bytes === null ? "no limit"
        : `of ${size(host.limit_bytes)} (${host.limit_source})`],
      ["Purgeable", size(host.purgeable_bytes), "released by a purge"],
      ["Heap, live", heap ? size(heap.live_bytes) : "unknown", heap ? `${size(heap.retained_bytes)} retained` : ""],
      ...(device ? [["Device, live", size(sumOf(device, (a) => a.live_bytes - a.asleep_bytes)),
        `${size(sumOf(device, (a) => a.retained_bytes))} retained`]] : []),
      ["Requests", `${requests.held} held`, `${requests.admitted} admitted, ${shed} rejected`],
    ];
    if (host.oom_kills) list.push(["OOM kills", host.oom_kills, "processes killed by the kernel"]);
    if (device && device.memory) list.push(["Device, free", size(device.memory.free_bytes), `of ${size(device.memory.total_bytes)}`]);
    keep($("now"), list, ([name]) => name, ([name]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, make("span"), make("span", { class: "more" }))),
    (tile, [name, value, more]) => {
      const [figure, beside] = tile.lastChild.children;
      write(figure, value);
      write(beside, more);
      if (name === "Pressure") figure.className = `level-${value}`;
    });
  };

  const ledgers = (told) => {
    const rows = ["host", "device"].filter((name) => told[name]).map((name) => ({ name, ...told[name].budget }));
    table($("ledgers"), "Reservations and limits of each budget", [
      ["Budget", (row) => row.name],
      ["Pressure", (row, cell) => { cell.className = `level-${row.level}`; return row.level; }],
      ["Reserved", (row) => size(row.reserved_bytes), "number"],
      ["Allowance", (row) => bound(row.allowance_bytes), "number"],
      ["Ceiling", (row) => bound(row.ceiling_bytes), "number"],
      ["Limit", (row) => row.name === "host" ? bound(told.host.limit_bytes) : "per arena", "number"],
      ["Correction factor", (row) => row.correction_factor.toFixed(2), "number"],
      ["Share of allowance", (row, cell) => {
        if (!cell.firstChild) cell.append(make("span", { class: "bar", "aria-hidden": "true" }, make("span")), make("span"));
        const share = row.allowance_bytes === null ? 0 : row.reserved_bytes >= row.allowance_bytes ? 1 : row.reserved_bytes / row.allowance_bytes;
        cell.firstChild.firstChild.style.width = `${100 * share}%`;
        write(cell.lastChild, row.allowance_bytes === null ? "no limit" : `${Math.round(100 * share)} %`);
      }],
    ], rows, (row) => row.name, "");
  };

  // Names come from clients and operators: they are only ever written as text.
  const mean = (bytes) => bytes === null ? "–" : size(bytes);
  const usage = (first) => [
    ...first,
    ["Live", (row) => size(row.live_bytes), "number"],
    ["Highest live", (row) => size(row.live_peak_bytes), "number"],
    ["Requests ended", (row) => row.requests, "number"],
    ["Needed, mean", (row) => mean(row.mean_peak_bytes), "number"],
    ["Reserved, mean", (row) => mean(row.mean_claim_bytes), "number"],
  ];
  const ROWS_MAX = 16;
  const requests = (told) => {
    $("permits").hidden = told.permits.length === 0;
    table($("permits"), "Requests that were admitted first", [
      ["Route", (row) => `${row.method} ${row.route}`, "wide"],
      ["Phase", (row) => row.phase],
      ["Reserved", (row) => size(row.reserved_bytes), "number"],
      ["Live", (row) => size(row.live_bytes), "number"],
      ["Age", (row) => lasting(row.age_seconds), "number"],
    ], told.permits, (row) => `${row.method}/${row.route}/${row.tenant}`, "");
    table($("largest"), "Running requests that hold most memory, from 256 KiB", [
      ["Route", (row) => `${row.method} ${row.route}`, "wide"],
      ["Tenant", (row) => row.tenant === null ? "–" : row.tenant, "wide"],
      ["Live", (row) => size(row.live_bytes), "number"],
      ["Peak", (row) => size(row.peak_bytes), "number"],
      ["Reserved", (row) => size(row.claim_bytes), "number"],
      ["Age", (row) => lasting(row.age_seconds), "number"],
      ["State", (row) => row.cancelled ? "cancelled" : row.spilled_bytes > 0 ? "spilled to disk" : "running"],
    ], told.largest_requests, (row) => `${row.method}/${row.route}/${row.tenant}`,
    "No running request is measured to hold 256 KiB.");
    const others = (row) => row.method === "other" && row.route === "other";
    table($("routes"), "Routes whose requests hold most memory, at most 16", usage([
      ["Route", (row) => others(row) ? "other routes" : `${row.method} ${row.route}`, "wide"],
    ]), told.routes.slice(0, ROWS_MAX), (row) => `${row.method}/${row.route}`, "No request has been measured.");
    $("tenants").hidden = told.tenants.length === 0;
    table($("tenants"), "Tenants whose requests hold most memory, at most 16", usage([
      ["Tenant", (row) => row.tenant, "wide"],
    ]), told.tenants.slice(0, ROWS_MAX), (row) => row.tenant, "");
  };

  const costOf = (bytes) => bytes.device === undefined ? size(bytes.host)
    : `${size(bytes.host)} host, ${size(bytes.device)} device`;
  const resources = (told) => table($("resources"), "Resources, and the time until they are unloaded if unused", [
    ["Resource", (row) => row.name],
    ["State", (row) => row.loaded ? "loaded" : row.loading ? `loading, ${row.waiting} waiting` : "unloaded"],
    ["In use by", (row) => row.guards, "number"],
    ["Reserved when loaded", (row) => costOf(row.cost_bytes), "number"],
    ["Unloads in", (row) => row.unload_in_seconds === null
      ? row.loaded ? (row.guards ? "in use" : "never") : "–" : lasting(row.unload_in_seconds), "number"],
    ["Loads", (row) => row.loads, "number"],
    ["", (row, cell) => { commandsOf(cell, [[0, "unload", "resource", row.name, "Unload", !row.loaded]]); }],
  ], told.resources, (row) => row.name, "No resource is registered.");

  const events = (told) => table($("events"), "Recent events, newest first", [
    ["Time", (row) => clock(row.at_seconds), "when"],
    ["Kind", (row) => row.kind],
    ["Subject", (row) => row.about || "all"],
    ["Event", (row) => row.times > 1 ? `${row.text} (${row.times} times)` : row.text, "wide"],
  ], [...told.events].reverse(), (row) => `${row.at_seconds}/${row.kind}/${row.about}`, "No events yet.");

  const diagnostics = (told) => {
    const place = $("diagnostics");
    if (!place.firstChild) place.append(make("p", { class: "none" }, "No diagnostics."), make("ul"));
    place.firstChild.hidden = told.diagnostics.length > 0;
    keep(place.lastChild, told.diagnostics, (diagnostic) => diagnostic, () => make("li", { class: "wide" }), (item, diagnostic) => write(item, diagnostic));
  };

  // Admin commands: their buttons exist only while the service accepts them.
  let hears = null;
  // Each is [place in the row, command, kind of name, name, text, disabled]: a button keeps its place
  // and the focus when its command changes.
  const commandsOf = (place, list) => {
    let row = place.querySelector(".row");
    if (!row) { row = make("div", { class: "row" }); place.append(row); }
    keep(row, hears ? list : [], ([slot]) => slot, () => {
      const button = make("button", { type: "button" }, make("span"), make("span", { class: "unseen" }));
      button.addEventListener("click", () => ask(...button.told, button));
      return button;
    }, (button, [, command, kind, name, text, off]) => {
      button.told = [command, kind, name];
      write(button.firstChild, text);
      write(button.lastChild, ` ${name}`);
      if (off) button.setAttribute("aria-disabled", "true");
      else if (!button.dataset.busy) button.removeAttribute("aria-disabled");
    });
  };
  const headers = () => {
    const token = $("token");
    return { "lowtide-admin": "1", ...(token && token.value ? { authorization: `Bearer ${token.value}` } : {}) };
  };
  const here = (more) => location.pathname.replace(/\/+$/, "") + more;
  const ask = async (command, kind, name, button) => {
    const what = name ? `${command} ${name}` : command;
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true");
    button.dataset.busy = "true";
    try {
      const query = kind ? `?${new URLSearchParams({ [kind]: name })}` : "";
      const answer = await fetch(here(`/${command}${query}`),
        { method: "POST", headers: headers(), cache: "no-store" });
      const told = await answer.json();
      say(answer.ok ? `Requested: ${what}.` : `Failed: ${what}. ${told.detail}.`, true);
      if (answer.ok) { asked.set(told.admin_task, what); mapsAt = 0; look(); }
    } catch (error) {
      say(`Failed: ${what}. ${error.message}.`, true);
    } finally {
      delete button.dataset.busy;
      button.removeAttribute("aria-disabled");
    }
  };
  const asked = new Map();
  const admin_tasks = (told) => {
    hears = told.admin_tasks;
    $("commands").hidden = !hears;
    if (!hears) return;
    const place = $("hear");
    if (!place.firstChild) {
      const token = make("p", { class: "row" }, make("label", { for: "token" }, "Token"),
        make("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false" }));
      const purge = make("button", { type: "button" },
        told.device ? "Purge heap and arenas" : "Purge heap");
      purge.addEventListener("click", () => ask("purge", null, "", purge));
      place.append(token, make("p", { id: "did", class: "none" }, "No command sent from this page."),
        make("div", { class: "row" }, purge));
    }
    place.firstChild.hidden = !hears.needs_token;
    for (const task of hears.list.filter((one) => asked.has(one.id) && one.outcome)) {
      say(`${asked.get(task.id)}: ${task.state}. ${task.outcome}.`, true);
      asked.delete(task.id);
      mapsAt = 0;
    }
    table($("admin_tasks"), "Recent admin tasks, newest first", [
      ["Time", (row) => clock(row.requested_at_seconds), "when"],
      ["Command", (row) => row.command],
      ["Subject", (row) => row.subject || "all"],
      ["State", (row) => row.state],
      ["Outcome", (row) => row.outcome || row.progress, "wide"],
    ], [...hears.list].reverse(), (row) => row.id, "No admin tasks yet.");
  };

  // Announcements for screen readers: rare, and each only once.
  const say = (text, asked) => {
    write($("said"), text);
    if (asked && $("did")) write($("did"), text);
  };
  let level = null;
  const listen = (told) => {
    const now = told.host.budget.level;
    if (level !== null && now !== level) say(`Pressure is ${now}, was ${level}.`);
    level = now;
  };

  // A map walks all blocks under the arena's lock, so the service sets the interval of requests. The
  // last map stays in between; after a command a new one is requested with the next figures.
  let lastMaps = [], mapsAt = 0, mapped = null;
  const takeMaps = (maps) => {
    lastMaps = maps;
    const again = Math.max(1, ...maps.map((of) => of.again_in_seconds));
    mapsAt = performance.now() + (again - 0.5) * EVERY_MS;
  };

  const show = (told) => {
    if (!told.managed) throw new Error("no Memory runs in this process");
    if (told.map) takeMaps(told.map);
    remember(told);
    verdict(told);
    parts(told);
    physical(told);
    inside(told);
    over(told);
    admin_tasks(told);
    tiles(told);
    chart($("heap"), "heap");
    for (const id of ["device", "arenas"]) $(id).closest("section").hidden = !told.device;
    if (told.device) chart($("device"), "device");
    ledgers(told);
    requests(told);
    if (told.device) arenas(told);
    resources(told);
    events(told);
    diagnostics(told);
    listen(told);
    write($("state"), `Profile ${told.profile}. Updated at ${clock(told.at_seconds)}, every second.`);
    document.documentElement.dataset.shown = "true";
  };

  // Polls each second while the page is visible; less often while the service does not answer.
  let timer = 0, failures = 0, paused = false, asking = null, gap = true;
  const later = (ms) => { clearTimeout(timer); if (!paused && !document.hidden) timer = setTimeout(look, ms); };
  const look = async () => {
    clearTimeout(timer);
    if (asking || document.hidden) return;
    asking = new AbortController();
    const late = setTimeout(() => asking && asking.abort(new Error("no answer within 5 s")), PATIENCE_MS);
    const parts = ["events", "admin_tasks", "largest_requests", "permits", "routes", "tenants", ...(gap ? ["history"] : []),
      ...(gap || performance.now() >= mapsAt ? ["map"] : []), ...OPENED.filter((id) => $(id).open)];
    let next = EVERY_MS;
    try {
      const answer = await fetch(`${location.pathname}?format=json&with=${parts}`,
        { signal: asking.signal, headers: { accept: "application/json" }, cache: "no-store" });
      if (!answer.ok) throw new Error(`the service answered ${answer.status}`);
      show(await answer.json());
      gap = false;
      if (failures) say("The service is answering again.");
      failures = 0;
      $("trouble").hidden = true;
    } catch (error) {
      if (!document.hidden) {
        failures++;
        gap = true;
        next = Math.min(BACKOFF_MAX_MS, EVERY_MS * 2 ** failures);
        const trouble = $("trouble");
        if (trouble.hidden) write(trouble, `No figures since ${clock(Date.now() / 1000)}: ${error.message}.`);
        trouble.hidden = false;
        write($("state"), `Next attempt in ${lasting(next / 1000)}.`);
      }
    } finally {
      clearTimeout(late);
      asking = null;
      later(next);
    }
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { clearTimeout(timer); gap = true; if (asking) asking.abort(); }
    else if (!paused) later(0);
  });
  const pause = $("pause");
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    gap = true;
    write(pause, paused ? "Resume" : "Pause");
    if (paused) { clearTimeout(timer); write($("state"), "Paused."); } else later(0);
  });
  $("key").append(...KINDS.map((kind) => swatch(kind, {
    live: "live", pending: "pending: freed, possibly still in use by the device", holes: "holes: free memory between live blocks",
    idle: "idle: committed without blocks", asleep: "asleep: live, without memory", bare: "bare: not committed",
  }[kind])));
  later(0);
})();
