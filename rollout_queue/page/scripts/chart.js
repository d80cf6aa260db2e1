/* One chart: a small plot of plotly.js on the axis that all charts share, wall time or steps, and its legend. */
(() => {
  "use strict";
  const { el, set, button, state, colour, format, isNumber, last, chartList } = slipstream;

  const HEIGHT = 168;
  const MARGIN = { l: 48, r: 10, t: 8, b: 22 };

  let untimed = false; // a run of which only the steps are known

  /** Notes whether the run's times are known: of one without them, charts are over steps. */
  function checkTimes(page) {
    untimed = !page.time.at.length && !page.steps.at.some(isNumber);
  }

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

  /** Returns the x values of a line, in seconds or steps. `shift`: seconds from another run's start to this one's. */
  function positions(line, page, shift) {
    const columns = page[line.from];
    if (mode() === "time") return columns.at.map((at) => at + shift);
    return line.from === "steps" ? columns.step : columns.at.map((at) => stepAt(page.steps, at));
  }

  /**
   * Returns a line's points with a gap at each of `breaks` (positions between two points). Of lines over steps the
   * points without a value are left out, since these have one now and then.
   */
  function broken(xs, ys, line, breaks) {
    const sparse = line.markers || line.from === "steps";
    const points = xs.map((x, i) => [x, ys[i]]).filter(([, y]) => !sparse || isNumber(y));
    if (!breaks.length) return { x: points.map(([x]) => x), y: points.map(([, y]) => y) };
    const gaps = breaks.map((at) => [at, null]).filter(([at]) => points.length && at > points[0][0] && at < points.at(-1)[0]);
    const all = [...points, ...gaps].sort((a, b) => a[0] - b[0]);
    return { x: all.map(([x]) => x), y: all.map(([, y]) => y) };
  }

  /** Returns the points of a stacked line, at 0 during each of `stops`. */
  function emptied(xs, ys, stops) {
    const zeros = stops.flatMap(([from, to]) => [from + 0.001, to - 0.001].map((at) => [at, 0]));
    const all = [...xs.map((x, i) => [x, ys[i]]), ...zeros].sort((a, b) => a[0] - b[0]);
    return { x: all.map(([x]) => x), y: all.map(([, y]) => y) };
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
      this.card = el(
        "figure",
        { class: "chart", "data-chart": id },
        this.title,
        el("div", { class: "plotbox" }, this.plot, this.line),
        this.legend,
      );
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
        const other = {
          ...page,
          ...page.compare,
          steps: { step: [], at: [], ...page.compare.steps },
          time: { at: [], ...page.compare.time },
        };
        runs.push([other, start - (other.time.at[0] ?? other.steps.at[0] ?? start), ` (${page.compare.run})`]);
      }
      this.traces = [];
      for (const [run, shift, suffix] of runs) {
        for (const line of suffix ? chartList.linesOf(chart, run) : chart.lines) {
          const own = this.traces.find((trace) => trace.name === line.name);
          const place = own ? own.place : this.traces.filter((trace) => !trace.other).length;
          const x = positions(line, run, shift);
          const y = chartList.valuesOf(line, run);
          const drawn = chart.stacked
            ? emptied(x, y, mode() === "time" ? this.owner.stops : [])
            : broken(x, y, line, suffix ? [] : this.owner.breaks());
          this.traces.push({ line, place, other: suffix !== "", name: line.name + suffix, ...drawn });
        }
      }
      const names = this.traces.map((trace) => trace.name).join("\n");
      if (names === this.names) return;
      this.names = names;
      set(this.title, { title: chart.help || null });
      this.title.replaceChildren(chart.title, chart.unit ? el("span", { class: "unit", text: chart.unit }) : "");
      this.legend.replaceChildren(...this.traces.map((trace) => this.legendItem(trace)));
    }

    legendItem(trace) {
      const item = button(
        "",
        () => {
          if (!this.hidden.delete(trace.name)) this.hidden.add(trace.name);
          item.setAttribute("aria-pressed", String(!this.hidden.has(trace.name)));
          this.dirty = true;
          this.owner.schedule();
        },
        { class: "series", "aria-pressed": "true", title: "Show or hide this line" },
      );
      item.append(
        el("i", {
          class: trace.other ? "dashed" : "",
          style: { "--swatch": `var(--series-${(trace.place % 10) + 1})` },
        }),
        el("span", { text: slipstream.visible(trace.name) }),
        el("b"),
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
          x: trace.x.map(toPlot),
          y: trace.y,
          name: trace.name,
          type: "scatter",
          line,
          mode: trace.line.markers ? "lines+markers" : "lines",
          marker: { size: 6, color: shade },
          connectgaps: Boolean(chart.stacked) && trace.line.from === "steps",
          opacity: trace.other ? 0.75 : 1,
          visible: !this.hidden.has(trace.name),
          hoverinfo: "skip",
          ...(chart.stacked ? { stackgroup: "all", line: { ...line, width: 0.6 }, fillcolor: `${shade}88` } : {}),
        };
      });
      const axis = { gridcolor: colour("--grid"), linecolor: colour("--border"), zeroline: false, automargin: false };
      const layout = {
        height: HEIGHT,
        margin: MARGIN,
        showlegend: false,
        hovermode: false,
        dragmode: this.owner.touch ? false : "zoom",
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, sans-serif", size: 11, color: colour("--dim") },
        xaxis: {
          ...axis,
          type: mode() === "time" ? "date" : "linear",
          range: this.owner.range().map(toPlot),
          ...this.ticks(),
        },
        yaxis: {
          ...axis,
          fixedrange: true,
          nticks: 5,
          rangemode: chart.stacked || chart.bound ? "tozero" : "normal",
          hoverformat: ".4g",
        },
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
      const nticks = Math.max(2, Math.floor((this.plot.clientWidth - MARGIN.l) / 70));
      if (mode() === "step") return { nticks, tickangle: 0 };
      const span = high - low;
      return { nticks, tickangle: 0, tickformat: span < 300 ? "%H:%M:%S" : span < 86400 ? "%H:%M" : "%b %d %H:%M" };
    }

    /** Returns the marks of events, the bound, and the time that the slider stands at. */
    shapes() {
      const upright = (x, line) => ({
        type: "line",
        xref: "x",
        yref: "paper",
        x0: toPlot(x),
        x1: toPlot(x),
        y0: 0,
        y1: 1,
        line,
        layer: "below",
      });
      const shapes = this.owner
        .marks()
        .map(([x, kind]) => upright(x, { color: colour(`--event-${kind}`) || colour("--dim"), width: 1, dash: "dot" }));
      if (this.chart.bound && isNumber(this.page.max_staleness)) {
        const y = this.page.max_staleness;
        shapes.push({
          type: "line",
          xref: "paper",
          x0: 0,
          x1: 1,
          y0: y,
          y1: y,
          line: { color: colour("--bad"), width: 1, dash: "dash" },
        });
      }
      for (const [from, to] of mode() === "time" ? this.owner.stops : []) {
        const [x0, x1] = [toPlot(from), toPlot(to)];
        const fillcolor = colour("--stop");
        shapes.push({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, fillcolor, line: { width: 0 }, layer: "below" });
      }
      const at = this.owner.sliderX();
      if (at !== null) shapes.push(upright(at, { color: colour("--accent"), width: 2 }));
      return shapes;
    }

    /** Shows each line's value at `x`, or its last. */
    values(x) {
      x ??= this.owner.sliderX();
      this.traces.forEach((trace, i) => {
        const value = x === null || !trace.x.length ? last(trace.y) : trace.y[nearest(trace.x, x)];
        const text = format.number(value);
        const node = this.legend.children[i].lastChild;
        if (node.textContent !== text) node.textContent = text;
      });
      if (x === null) {
        const said = this.traces.slice(0, 6).map((trace) => `${trace.name} ${format.number(last(trace.y))}`);
        this.card.setAttribute(
          "aria-label",
          slipstream.visible(`${this.chart.title}, newest values: ${said.join(", ")}`),
        );
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

  slipstream.chart = { Chart, MARGIN, checkTimes, mode, nearest, stepAt, fromPlot };
})();
