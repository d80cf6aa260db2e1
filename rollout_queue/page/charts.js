/* Charts on one axis, wall time or steps: each a small plot of plotly.js, with one zoom and one cursor for all of them.
 * Only those in view are drawn, and drawn again no more often than they can be. */
(() => {
  "use strict";
  const { el, button, select, state, theme, colour, format, isNumber, last, chartList } = slipstream;

  const HEIGHT = 168;
  const MARGIN = { l: 48, r: 10, t: 8, b: 22 };
  const MAX_MARKS = 60; // events that are drawn as marks
  const WINDOWS = {
    time: [["", "whole run"], ["900", "last 15 min"], ["7200", "last 2 h"], ["86400", "last day"]],
    step: [["", "whole run"], ["50", "last 50 steps"], ["500", "last 500 steps"], ["5000", "last 5,000 steps"]],
  };

  let untimed = false; // a run of which only the steps are known

  const mode = () => (state.get("x") === "step" || (untimed && state.get("x") !== "time") ? "step" : "time");

  /** Returns the index of the last value that is at most `x`, -1 if none. Values rise. */
  function before(values, x) {
    let [low, high] = [0, values.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** Returns the index of the value nearest to `x`. */
  function nearest(values, x) {
    const i = before(values, x);
    if (i < 0) return 0;
    return i + 1 < values.length && values[i + 1] - x < x - values[i] ? i + 1 : i;
  }

  /** Returns the step, with its fraction, that was under way at a wall time; null without steps. */
  function stepAt(steps, at) {
    const i = before(steps.at, at);
    if (!steps.at.length) return null;
    if (i < 0) return steps.step[0] - 1;
    if (i + 1 >= steps.at.length) return steps.step[i];
    const share = (at - steps.at[i]) / Math.max(1e-9, steps.at[i + 1] - steps.at[i]);
    return steps.step[i] + share * (steps.step[i + 1] - steps.step[i]);
  }

  /** Returns the x values of a line, in seconds or steps. `shift`: seconds that bring another run to this one's start. */
  function positions(line, page, shift) {
    const columns = page[line.from];
    if (mode() === "time") return columns.at.map((at) => at + shift);
    return line.from === "steps" ? columns.step : columns.at.map((at) => stepAt(page.steps, at));
  }

  // plotly draws dates in UTC: the reader's own clock is put in by moving them.
  const zone = () => new Date().getTimezoneOffset() * 60;
  const toPlot = (x) => (mode() === "time" ? (x - zone()) * 1000 : x);
  const fromPlot = (value) => (mode() === "time" ? value / 1000 + zone() : value);

  /** One chart: its plot, and a legend that shows the values at the cursor. */
  class Chart {
    constructor(id, owner) {
      this.id = id;
      this.owner = owner;
      this.hidden = new Set();
      this.dirty = true;
      this.inView = false;
      this.names = "";
      this.traces = [];
      this.title = el("h3");
      this.plot = el("div", { class: "plot", style: { height: `${HEIGHT}px` } });
      this.line = el("div", { class: "cursor", hidden: true });
      this.label = el("span");
      this.line.append(this.label);
      this.legend = el("div", { class: "legend" });
      this.card = el("figure", { class: "chart", "data-chart": id }, this.title, el("div", { class: "plotbox" }, this.plot, this.line), this.legend);
      this.plot.addEventListener("pointermove", (event) => owner.point(this, event));
      this.plot.addEventListener("pointerleave", () => owner.moveCursor(null, null));
      owner.observer.observe(this.card);
      owner.charts.set(this.card, this);
    }

    /** Takes the chart's definition and the data; draws now if it is in view. */
    update(chart, page) {
      this.chart = chart;
      this.page = page;
      this.dirty = true;
    }

    /** Makes plotly's traces and the values for the legend. */
    collect() {
      const { chart, page } = this;
      const start = page.time.at[0] ?? page.steps.at[0] ?? 0;
      const runs = [[page, 0, ""]];
      if (page.compare && !chart.stacked) {
        const other = { ...page, ...page.compare, steps: { step: [], at: [], ...page.compare.steps }, time: { at: [], ...page.compare.time } };
        runs.push([other, start - (other.time.at[0] ?? other.steps.at[0] ?? start), ` (${page.compare.run})`]);
      }
      this.traces = [];
      for (const [run, shift, suffix] of runs) {
        for (const line of suffix ? chartList.linesOf(chart, run) : chart.lines) {
          const own = this.traces.find((trace) => trace.name === line.name);
          const place = own ? own.place : this.traces.filter((trace) => !trace.other).length;
          this.traces.push({
            line, place, other: suffix !== "", name: line.name + suffix,
            x: positions(line, run, shift), y: chartList.valuesOf(line, run),
          });
        }
      }
      const names = this.traces.map((trace) => trace.name).join("\n");
      if (names === this.names) return;
      this.names = names;
      this.title.replaceChildren(chart.title, chart.unit ? el("span", { class: "unit", text: chart.unit }) : "");
      this.legend.replaceChildren(...this.traces.map((trace) => this.legendItem(trace)));
    }

    legendItem(trace) {
      const item = button("", () => {
        if (!this.hidden.delete(trace.name)) this.hidden.add(trace.name);
        item.setAttribute("aria-pressed", String(!this.hidden.has(trace.name)));
        this.dirty = true;
        this.owner.schedule();
      }, { class: "series", "aria-pressed": "true", title: "Show or hide this line" });
      item.append(
        el("i", { class: trace.other ? "dashed" : "", style: { "--swatch": `var(--series-${(trace.place % 10) + 1})` } }),
        el("span", { text: slipstream.visible(trace.name) }), el("b"),
      );
      return item;
    }

    draw() {
      this.collect();
      this.dirty = false;
      const { chart } = this;
      const data = this.traces.map((trace) => {
        const shade = colour(`--series-${(trace.place % 10) + 1}`);
        const line = { color: shade, width: trace.line.width || 1.4, dash: trace.other ? "dash" : "solid" };
        return {
          x: trace.x.map(toPlot), y: trace.y, name: trace.name, type: "scatter", line,
          mode: trace.line.markers ? "lines+markers" : "lines", marker: { size: 6, color: shade },
          connectgaps: Boolean(trace.line.markers) || trace.line.from === "steps", opacity: trace.other ? 0.75 : 1,
          visible: !this.hidden.has(trace.name), hoverinfo: "skip",
          ...(chart.stacked ? { stackgroup: "all", line: { ...line, width: 0.6 }, fillcolor: `${shade}88` } : {}),
        };
      });
      const axis = { gridcolor: colour("--grid"), linecolor: colour("--border"), zeroline: false, automargin: false };
      const layout = {
        height: HEIGHT, margin: MARGIN, showlegend: false, hovermode: false, dragmode: this.owner.touch ? false : "zoom",
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, sans-serif", size: 11, color: colour("--dim") },
        xaxis: { ...axis, type: mode() === "time" ? "date" : "linear", range: this.owner.range().map(toPlot), ...this.ticks() },
        yaxis: { ...axis, fixedrange: true, nticks: 5, rangemode: chart.stacked || chart.bound ? "tozero" : "normal", hoverformat: ".4g" },
        shapes: this.shapes(),
      };
      const config = { displayModeBar: false, doubleClick: false, responsive: true, scrollZoom: false };
      if (this.drawn) {
        Plotly.react(this.plot, data, layout, config);
      } else {
        this.drawn = true;
        Plotly.newPlot(this.plot, data, layout, config);
        this.plot.on("plotly_relayout", (change) => this.owner.zoomed(this, change));
        this.plot.on("plotly_doubleclick", () => this.owner.zoom(null));
      }
      this.values(null);
    }

    /** Returns how the axis is labelled: upright words, as many as there is room for. */
    ticks() {
      const [low, high] = this.owner.range();
      const nticks = Math.max(2, Math.floor((this.plot.clientWidth - MARGIN.l) / 90));
      if (mode() === "step") return { nticks, tickangle: 0 };
      const span = high - low;
      return { nticks, tickangle: 0, tickformat: span < 300 ? "%H:%M:%S" : span < 86400 ? "%H:%M" : "%b %d %H:%M" };
    }

    /** Returns the marks of events, the bound, and the time that the slider stands at. */
    shapes() {
      const upright = (x, line) => ({ type: "line", xref: "x", yref: "paper", x0: toPlot(x), x1: toPlot(x), y0: 0, y1: 1, line, layer: "below" });
      const shapes = this.owner.marks().map(([x, kind]) => upright(x, { color: colour(`--event-${kind}`) || colour("--dim"), width: 1, dash: "dot" }));
      if (this.chart.bound && isNumber(this.page.max_staleness)) {
        const y = this.page.max_staleness;
        shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("--bad"), width: 1, dash: "dash" } });
      }
      const at = this.owner.sliderX();
      if (at !== null) shapes.push(upright(at, { color: colour("--accent"), width: 2 }));
      return shapes;
    }

    /** Shows each line's value at `x`, or its last. */
    values(x) {
      this.traces.forEach((trace, i) => {
        const value = x === null || !trace.x.length ? last(trace.y) : trace.y[nearest(trace.x, x)];
        const text = format.number(value);
        const node = this.legend.children[i].lastChild;
        if (node.textContent !== text) node.textContent = text;
      });
      if (x === null) {
        const said = this.traces.slice(0, 6).map((trace) => `${trace.name} ${format.number(last(trace.y))}`);
        this.card.setAttribute("aria-label", slipstream.visible(`${this.chart.title}, newest values: ${said.join(", ")}`));
      }
    }

    /** Draws the cursor at `x`, with its label in the chart that the pointer is in. */
    cursor(x, pointed) {
      const axis = this.drawn && this.plot._fullLayout.xaxis;
      const place = axis && x !== null ? axis.c2p(toPlot(x)) : -1;
      this.line.hidden = !(place >= 0 && axis && place <= axis._length);
      if (!this.line.hidden) {
        this.line.style.left = `${MARGIN.l + place}px`;
        this.label.textContent = pointed ? this.owner.describe(x) : "";
        this.line.classList.toggle("left", place > axis._length * 0.75);
      }
      if (this.drawn && !this.dirty) this.values(x);
    }
  }

  /** A grid of charts. `only`: ids of those to show, in their order, without the tools; null for all, in sections. */
  class Charts {
    constructor(container, only = null) {
      this.container = container;
      this.only = only;
      this.charts = new Map();
      this.byId = new Map();
      this.sections = new Map();
      this.touch = window.matchMedia("(pointer: coarse)").matches;
      this.cost = 0;
      this.observer = new IntersectionObserver((entries) => {
        for (const entry of entries) this.charts.get(entry.target).inView = entry.isIntersecting;
        this.schedule();
      }, { rootMargin: "150px" });
      this.grid = el("div", { class: only ? "grid headline" : "sections" });
      container.append(...(only ? [] : [this.tools()]), this.grid);
      const plotly = document.querySelector('script[src="page/plotly.js"]');
      if (plotly) plotly.addEventListener("load", () => this.schedule());
      theme.listen(() => this.redraw());
    }

    tools() {
      const chosen = (changes) => state.set({ from: null, to: null, ...changes });
      this.axis = el("span", { class: "choice", role: "group", "aria-label": "Horizontal axis" },
        ["time", "step"].map((each) => button(each === "time" ? "Time" : "Step", () => chosen({ x: each, last: null }), { "data-x": each })));
      this.window = el("span");
      this.find = el("input", { type: "search", placeholder: "Find a chart", "aria-label": "Find a chart", value: state.get("chart"), on: { input: () => state.set({ chart: this.find.value }) } });
      this.reset = button("Reset zoom", () => this.zoom(null), { hidden: true });
      return el("div", { class: "tools" }, this.axis, this.window, this.reset, this.find, el("span", { class: "hint", text: "Drag to zoom, double-click for everything" }));
    }

    /** Puts new data in; the charts follow when they can. */
    update(page, at = null) {
      this.page = page;
      this.at = at;
      untimed = !page.time.at.length && !page.steps.at.some(isNumber);
      const wanted = (state.get("chart") || "").toLowerCase();
      let found = chartList.chartsOf(page);
      if (this.only) found = this.only.map((id) => found.find((chart) => chart.id === id)).filter(Boolean);
      else found = found.filter((chart) => !wanted || `${chart.title} ${chart.lines.map((line) => `${line.name} ${line.key}`).join(" ")}`.toLowerCase().includes(wanted));
      const ids = new Set(found.map((chart) => chart.id));
      for (const [id, chart] of this.byId) if (!ids.has(id)) this.remove(id, chart);
      for (const definition of found) {
        if (!this.byId.has(definition.id)) {
          const chart = new Chart(definition.id, this);
          this.byId.set(definition.id, chart);
          this.place(definition, chart, found);
        }
        this.byId.get(definition.id).update(definition, page);
      }
      for (const section of this.sections.values()) section.hidden = !section.querySelector(".chart");
      if (!this.only) this.showTools(found.length);
      this.schedule();
    }

    remove(id, chart) {
      this.observer.unobserve(chart.card);
      this.charts.delete(chart.card);
      this.byId.delete(id);
      if (chart.drawn) Plotly.purge(chart.plot);
      chart.card.remove();
    }

    /** Puts a chart where its definition stands among the others. */
    place(definition, chart, found) {
      let grid = this.grid;
      if (!this.only) {
        if (!this.sections.size) for (const name of chartList.SECTIONS) this.addSection(name);
        grid = this.sections.get(definition.section).querySelector(".grid");
      }
      const following = found.slice(found.indexOf(definition) + 1).find((other) => other.section === definition.section && this.byId.has(other.id));
      grid.insertBefore(chart.card, following && (this.only || following.section === definition.section) ? this.byId.get(following.id).card : null);
    }

    addSection(name) {
      const section = el("details", { class: "section", open: name !== chartList.SECTIONS.at(-1) }, el("summary", { text: name }), el("div", { class: "grid" }));
      this.sections.set(name, section);
      this.grid.append(section);
    }

    showTools(amount) {
      for (const each of this.axis.children) each.setAttribute("aria-pressed", String(each.dataset.x === mode()));
      if (this.windowMode !== mode()) {
        this.windowMode = mode();
        this.window.replaceChildren(select("Part of the run", WINDOWS[mode()], state.get("last"), (value) => state.set({ last: value, from: null, to: null })));
      }
      if (document.activeElement !== this.find) this.find.value = state.get("chart");
      this.reset.hidden = !state.get("from");
      this.grid.dataset.empty = amount ? "" : "No chart has anything to draw yet: the first step brings them.";
    }

    /** Returns the first and last x that all charts show. */
    range() {
      if (state.get("from") && state.get("to")) return [Number(state.get("from")), Number(state.get("to"))];
      const { steps, time, compare, now, live } = this.page;
      const firsts = mode() === "step" ? [steps.step[0]] : [steps.at[0], time.at[0]];
      const lasts = mode() === "step" ? [steps.step.at(-1)] : [steps.at.at(-1), time.at.at(-1), live ? now : null];
      if (mode() === "step" && compare && compare.steps) lasts.push(compare.steps.step.at(-1));
      const low = Math.min(...firsts.filter(isNumber));
      const high = Math.max(...lasts.filter(isNumber));
      if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
      const from = state.get("last") ? Math.max(low, high - Number(state.get("last"))) : low;
      const pad = Math.max(mode() === "step" ? 0.5 : 1, 0.01 * (high - from));
      return [from - pad, high + pad];
    }

    /** Returns [x, kind] of the newest events in the range. */
    marks() {
      const [low, high] = this.range();
      const found = [];
      for (let i = this.page.events.length - 1; i >= 0 && found.length < MAX_MARKS; i--) {
        const event = this.page.events[i];
        const x = this.toX(event.at);
        if (x !== null && x >= low && x <= high) found.push([x, event.kind]);
      }
      return found;
    }

    /** Returns wall time as a position on the axis. */
    toX(at) {
      return mode() === "time" ? at : stepAt(this.page.steps, at);
    }

    sliderX() {
      return this.at === null ? null : this.toX(this.at);
    }

    /** Says what a position is: a time, and the step that was under way. */
    describe(x) {
      if (mode() === "step") return `step ${Math.round(x)}`;
      const step = stepAt(this.page.steps, x);
      return `${format.clock(x, true)}${step === null ? "" : `, step ${Math.max(0, Math.floor(step))}`}`;
    }

    point(chart, event) {
      if (!chart.drawn) return;
      const axis = chart.plot._fullLayout.xaxis;
      const place = event.clientX - chart.plot.getBoundingClientRect().left - MARGIN.l;
      this.moveCursor(place < 0 || place > axis._length ? null : fromPlot(axis.p2c(place)), chart);
    }

    /** Moves the cursor of every chart to `x`; null takes it away. */
    moveCursor(x, pointed) {
      for (const chart of this.charts.values()) if (chart.inView) chart.cursor(x, chart === pointed);
    }

    zoomed(chart, change) {
      if (this.setting || !("xaxis.range[0]" in change)) return;
      const axis = chart.plot._fullLayout.xaxis;
      this.zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]].map((value) => fromPlot(axis.r2c(value))));
    }

    /** Shows [from, to] in all charts; null for everything. */
    zoom(range) {
      const round = (value) => Number(value.toFixed(3));
      state.set({ from: range && round(range[0]), to: range && round(range[1]), last: range ? null : state.get("last") });
    }

    redraw() {
      for (const chart of this.charts.values()) chart.dirty = true;
      this.schedule();
    }

    /** Draws what is in view and has changed, soon; a slow machine gets time to breathe between. */
    schedule() {
      if (this.timer || !window.Plotly || !this.page) return;
      this.timer = setTimeout(() => {
        this.timer = null;
        if (document.hidden || !this.container.offsetParent) return;
        const began = performance.now();
        this.setting = true;
        for (const chart of this.charts.values()) if (chart.dirty && chart.inView) chart.draw();
        this.setting = false;
        this.cost = performance.now() - began;
      }, Math.min(5000, 5 * this.cost));
    }
  }

  slipstream.charts = { Charts, stepAt, nearest };
})();
