"use strict";
// Draws the curves of a run's report with uPlot. On the live page (`body[data-live]`) it also asks the server for the
// newest content, replaces the parts that changed, and gives the new values to the charts, which keep their zoom.
(() => {
  const REFRESH_MS = 1000, DEADLINE_MS = 30000;
  const charts = document.getElementById("charts");
  const views = new Map(); // by name of the chart
  let data = read(document);

  function read(page) {
    return JSON.parse(page.getElementById("run-data").textContent);
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function number(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    return Number(value.toPrecision(size >= 1e4 ? 9 : 4)).toLocaleString("en", {maximumFractionDigits: size >= 1e4 ? 0 : 6});
  }

  // --- one chart ---------------------------------------------------------------------------------------------------

  function columns(view) {
    const tables = view.chart.tables.map(([x, ...rest]) => [x === "steps" ? data.steps : x, ...rest]);
    const drawn = view.log
      ? tables.map(([x, ...rest]) => [x, ...rest.map((column) => column.map((y) => (y > 0 ? y : null)))])
      : tables;
    return drawn.length > 1 ? uPlot.join(drawn) : drawn[0];
  }

  function yRange(view) {
    return (plot, low, high) => {
      if (low === null || high === null) return view.log ? [0.1, 1] : [0, 1];
      if (view.log) return uPlot.rangeLog(low, high, 10, false);
      if (view.chart.range && whole(plot)) return view.chart.range;
      if (view.chart.zero) return [Math.min(1.12 * low, 0), Math.max(1.12 * high, 1e-12)];
      return uPlot.rangeNum(low, high, 0.1, true);
    };
  }

  function xRange(view) {
    const bars = view.chart.series[0].bars;
    return (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (bars) return [low - 1, high + 1];
      const x = plot.data[0], steps = data.steps;
      if (!view.chart.x && low <= x[0] && high >= x[x.length - 1]) { // all charts of steps have one axis
        [low, high] = [Math.min(low, steps[0]), Math.max(high, steps[steps.length - 1])];
      }
      return low < high ? [low, high] : [low - 1, high + 1];
    };
  }

  function whole(plot) {
    const [first, last] = plot.series[0].idxs; // of the points to draw; `scales.x` is still the old one here
    return first === 0 && last === plot.data[0].length - 1;
  }

  function zoomed(plot) {
    const x = plot.data[0], {min, max} = plot.scales.x;
    return x.length > 1 && min !== undefined && min !== null && (min > x[0] || max < x[x.length - 1]);
  }

  function line(series, view) {
    const stroke = colour(series.colour);
    return {
      label: series.name,
      stroke,
      alpha: series.faint ? 0.35 : 1,
      fill: series.bars ? stroke : undefined,
      width: series.faint ? 1 : view.chart.small ? 1.3 : 1.8,
      paths: series.bars ? uPlot.paths.bars({size: [0.86]}) : undefined,
      points: {show: series.bars ? false : series.points ? true : undefined, size: 5},
      value: (plot, value) => number(value),
    };
  }

  function marks(view) {
    return (plot) => {
      if (view.chart.x) return; // not over steps
      const {left, top, width, height} = plot.bbox, ink = plot.ctx, ratio = devicePixelRatio;
      const places = (steps) => steps.map((step) => plot.valToPos(step, "x", true));
      const inside = (steps) => places(steps).filter((x) => x >= left && x <= left + width);
      ink.save();
      ink.strokeStyle = colour("bad");
      ink.lineWidth = 1.2 * ratio;
      ink.setLineDash([3 * ratio, 2 * ratio]);
      for (const x of inside(data.failures)) {
        ink.beginPath();
        ink.moveTo(x, top);
        ink.lineTo(x, top + height);
        ink.stroke();
      }
      ink.fillStyle = colour("good");
      for (const x of inside(data.recoveries)) {
        ink.beginPath();
        ink.moveTo(x, top + height - 8 * ratio);
        ink.lineTo(x - 5 * ratio, top + height);
        ink.lineTo(x + 5 * ratio, top + height);
        ink.fill();
      }
      ink.restore();
    };
  }

  function pinch(view) { // two fingers zoom and move the steps between them; two taps are uPlot's double click
    const over = view.plot.over, APART = 20; // pixels; fingers one above the other scroll
    let held;
    const fingers = (event) => {
      const left = over.getBoundingClientRect().left;
      const places = [...event.targetTouches].map((touch) => touch.clientX - left).sort((one, other) => one - other);
      return places.length === 2 && places[1] - places[0] >= APART ? places : null;
    };
    const scale = (low, high) => {
      const x = view.chart.x ? view.plot.data[0] : data.steps, first = x[0], last = x[x.length - 1];
      const span = Math.min(high - low, last - first), min = Math.min(Math.max(low, first), last - span), max = min + span;
      if (!(min < max) || view.plot.over !== over) return;
      for (const each of views.values()) {
        if (each === view || !(each.chart.x || view.chart.x)) each.plot.setScale("x", {min, max});
      }
    };
    over.addEventListener("touchstart", (event) => {
      held = fingers(event)?.map((x) => view.plot.posToVal(x, "x"));
    }, {passive: true});
    over.addEventListener("touchmove", (event) => {
      const places = fingers(event);
      if (!held || !places) return;
      event.preventDefault();
      const [left, right] = places, unit = (held[1] - held[0]) / (right - left);
      scale(held[0] - left * unit, held[1] + (over.clientWidth - right) * unit);
    }, {passive: false});
  }

  function draw(view) {
    const chart = view.chart, kept = view.plot && zoomed(view.plot) ? {...view.plot.scales.x} : null;
    if (view.plot) view.plot.destroy();
    const soft = colour("soft"), grid = {stroke: colour("grid"), width: 1};
    const axis = {stroke: soft, size: 34, font: "12px system-ui, sans-serif", grid, ticks: {...grid, size: 4}};
    const values = (plot, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
    view.plot = new uPlot(
      {
        width: Math.max(view.host.clientWidth, 120),
        height: chart.small ? 150 : 280,
        cursor: {drag: {x: true, y: false}, ...(chart.x ? {} : {sync: {key: "steps", scales: ["x", null]}})},
        scales: {x: {time: false, range: xRange(view)}, y: {distr: view.log ? 3 : 1, range: yRange(view)}},
        axes: [{...axis, grid: {show: false}, space: 60, values}, {...axis, ticks: {show: false}, size: 60, values}],
        series: [{label: chart.x || "step", value: (plot, value) => number(value)},
          ...chart.series.map((series) => line(series, view))],
        hooks: {draw: [marks(view)]},
      },
      columns(view),
      view.host,
    );
    if (!chart.series[0].bars) pinch(view);
    if (kept) view.plot.setScale("x", {min: kept.min, max: kept.max});
  }

  function add(chart) {
    const section = document.createElement("section"), title = document.createElement("h3");
    const view = {chart, log: false, plot: null, host: document.createElement("div"), section};
    section.className = chart.small ? "chart small" : "chart";
    section.dataset.chart = chart.name;
    title.textContent = chart.title;
    view.host.className = "plot";
    section.append(title, view.host);
    if (chart.log) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "log scale";
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        view.log = !view.log;
        button.setAttribute("aria-pressed", String(view.log));
        draw(view);
      });
      title.append(" ", button);
    }
    charts.append(section);
    views.set(chart.name, view);
    draw(view);
    new ResizeObserver(() => {
      const width = Math.max(view.host.clientWidth, 120);
      if (Math.abs(width - view.plot.width) > 1) view.plot.setSize({width, height: view.plot.height});
    }).observe(view.host);
  }

  function update(view, chart) {
    const same = JSON.stringify(chart.series) === JSON.stringify(view.chart.series);
    view.chart = chart;
    view.section.firstChild.firstChild.data = chart.title;
    if (!same) return draw(view); // another curve, such as the first evaluation
    const kept = zoomed(view.plot) ? {...view.plot.scales.x} : null;
    view.plot.batch(() => {
      view.plot.setData(columns(view), kept === null);
      if (kept) view.plot.setScale("x", {min: kept.min, max: kept.max});
    });
  }

  function show() {
    const names = new Set(data.charts.map((chart) => chart.name));
    for (const [name, view] of views) {
      if (names.has(name)) continue; // a run that began again has fewer
      view.plot.destroy();
      view.section.remove();
      views.delete(name);
    }
    for (const chart of data.charts) {
      if (views.has(chart.name)) update(views.get(chart.name), chart);
      else add(chart);
    }
  }

  // --- the live page -------------------------------------------------------------------------------------------------

  function replace(part, next) {
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    const boxes = [...part.querySelectorAll(".scroll")].map((box) => {
      return {top: box.scrollTop, end: box.scrollTop + box.clientHeight >= box.scrollHeight - 4};
    });
    part.replaceChildren(...next.childNodes);
    part.querySelectorAll("details").forEach((each, place) => (each.open = open[place] ?? each.open));
    part.querySelectorAll(".scroll").forEach((box, place) => {
      const before = boxes[place];
      box.scrollTop = !before || before.end ? box.scrollHeight : before.top;
    });
  }

  function apply(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    data = read(page);
    for (const part of document.querySelectorAll("[data-part]")) {
      const next = page.querySelector(`[data-part="${part.dataset.part}"]`);
      if (next && next.innerHTML !== part.innerHTML) replace(part, next);
    }
    document.title = data.title;
    show();
  }

  async function refresh(shown) {
    const status = document.getElementById("status"), headers = {"If-None-Match": shown};
    const signal = AbortSignal.timeout(DEADLINE_MS);
    try {
      const answer = await fetch(`body${location.search}`, {cache: "no-store", headers, signal});
      if (answer.status !== 304) { // something is new
        const text = await answer.text();
        if (!answer.ok) throw new Error(text);
        apply(text);
        shown = answer.headers.get("ETag");
      }
      status.textContent = "";
    } catch (error) {
      status.textContent = `This page is not up to date, and tries again: ${error.message}`;
    }
    // another driver may take an interrupted run over
    if (["running", "interrupted"].includes(data.state) || status.textContent) setTimeout(refresh, REFRESH_MS, shown);
  }

  show();
  document.querySelectorAll(".scroll").forEach((box) => (box.scrollTop = box.scrollHeight));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.forEach(draw));
  if ("live" in document.body.dataset && data.state === "running") setTimeout(refresh, REFRESH_MS, "");
})();
