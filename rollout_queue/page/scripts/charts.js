/* All charts: one zoom, one cursor and one axis for them. Only those in view are drawn, a few at a time, and
 * drawn again no more often than they can be. */
(() => {
  "use strict";
  const { el, button, select, state, theme, format, isNumber, chartList } = slipstream;
  const { Chart, MARGIN, checkTimes, mode, stepAt, fromPlot } = slipstream.chart;

  const { stopsOf } = slipstream.source;

  const MAX_MARKS = 60; // events that are drawn as marks
  const SLICE_MS = 50; // of drawing, before the page may answer again
  const WINDOWS = {
    time: [
      ["", "whole run"],
      ["900", "last 15 min"],
      ["7200", "last 2 h"],
      ["86400", "last day"],
    ],
    step: [
      ["", "whole run"],
      ["50", "last 50 steps"],
      ["500", "last 500 steps"],
      ["5000", "last 5,000 steps"],
    ],
  };

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
      this.stops = [];
      this.observer = new IntersectionObserver(
        (entries) => {
          for (const entry of entries) this.charts.get(entry.target).inView = entry.isIntersecting;
          this.schedule();
        },
        { rootMargin: "150px" },
      );
      this.grid = el("div", { class: only ? "grid headline" : "sections" });
      container.append(...(only ? [] : [this.tools()]), this.grid);
      const plotly = document.querySelector('script[src="page/plotly.js"]');
      if (plotly) plotly.addEventListener("load", () => this.schedule());
      theme.listen(() => this.redraw());
    }

    tools() {
      const chosen = (changes) => state.set({ from: null, to: null, ...changes });
      this.axis = el(
        "span",
        { class: "choice", role: "group", "aria-label": "Horizontal axis" },
        ["time", "step"].map((each) =>
          button(each === "time" ? "Time" : "Step", () => chosen({ x: each, last: null }), { "data-x": each }),
        ),
      );
      this.window = el("span");
      this.find = el("input", {
        type: "search",
        placeholder: "Find a chart",
        "aria-label": "Find a chart",
        value: state.get("chart"),
        on: { input: () => state.set({ chart: this.find.value }) },
      });
      this.reset = button("Reset zoom", () => this.zoom(null), { hidden: true });
      return el(
        "div",
        { class: "tools" },
        this.axis,
        this.window,
        this.reset,
        this.find,
        el("span", { class: "hint", text: "Drag to zoom, double-click for everything" }),
      );
    }

    /** Puts new data in; the charts follow when they can. */
    update(page, at = null) {
      this.page = page;
      this.at = at;
      this.stops = stopsOf(page);
      checkTimes(page);
      const wanted = (state.get("chart") || "").toLowerCase();
      let found = chartList.chartsOf(page);
      if (this.only) found = this.only.map((id) => found.find((chart) => chart.id === id)).filter(Boolean);
      else
        found = found.filter(
          (chart) =>
            !wanted ||
            `${chart.title} ${chart.lines.map((line) => `${line.name} ${line.key}`).join(" ")}`
              .toLowerCase()
              .includes(wanted),
        );
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
      const following = found
        .slice(found.indexOf(definition) + 1)
        .find((other) => other.section === definition.section && this.byId.has(other.id));
      grid.insertBefore(
        chart.card,
        following && (this.only || following.section === definition.section) ? this.byId.get(following.id).card : null,
      );
    }

    addSection(name) {
      const section = el(
        "details",
        { class: "section", open: name !== chartList.SECTIONS.at(-1) },
        el("summary", { text: name }),
        el("div", { class: "grid" }),
      );
      this.sections.set(name, section);
      this.grid.append(section);
    }

    showTools(amount) {
      for (const each of this.axis.children) each.setAttribute("aria-pressed", String(each.dataset.x === mode()));
      if (this.windowMode !== mode()) {
        this.windowMode = mode();
        this.window.replaceChildren(
          select("Part of the run", WINDOWS[mode()], state.get("last"), (value) =>
            state.set({ last: value, from: null, to: null }),
          ),
        );
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

    /** Returns where lines break: in the middle of each stop, and where a session of the learner began. */
    breaks() {
      if (mode() !== "time") return [];
      const began = this.page.events.filter(({ kind, text }) => kind === "learner" && text.includes("began session"));
      return [...this.stops.map(([from, to]) => (from + to) / 2), ...began.map((event) => event.at)];
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
      const stop = this.stops.find(([from, to]) => x > from && x < to);
      if (stop) return `the run was stopped for ${format.seconds(stop[1] - stop[0])}`;
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
      state.set({
        from: range && round(range[0]),
        to: range && round(range[1]),
        last: range ? null : state.get("last"),
      });
    }

    redraw() {
      for (const chart of this.charts.values()) chart.dirty = true;
      this.schedule();
    }

    /** Draws what is in view and has changed, soon; a slow machine gets time to breathe between. */
    schedule(delay = Math.min(5000, 5 * this.cost)) {
      if (this.timer || !window.Plotly || !this.page) return;
      this.timer = setTimeout(() => {
        this.timer = null;
        if (document.hidden || !this.container.offsetParent) return;
        const began = performance.now();
        const waiting = [...this.charts.values()].filter((chart) => chart.dirty && chart.inView);
        this.setting = true;
        while (waiting.length && performance.now() - began < SLICE_MS) waiting.shift().draw();
        this.setting = false;
        this.cost = performance.now() - began;
        if (waiting.length) this.schedule(0);
      }, delay);
    }
  }

  slipstream.charts = { Charts };
})();
