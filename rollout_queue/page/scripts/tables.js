/* Tables that sort, filter and turn pages, so that a thousand rows cost no more than fifty; the fleet's tables and the
 * log of events are made of them. */
(() => {
  "use strict";
  const { el, set, button, state, visible, format, isNumber } = slipstream;
  const { bytes, count, number, percent, seconds, clock, plural } = format;

  const PAGE_ROWS = 50;

  /**
   * A table of `columns`: {key, title, value(row), text(row), class(row), numeric}. `value` sorts, `text` shows.
   * `id` names its order in the view's state.
   */
  class Table {
    constructor(container, id, title, columns, options = {}) {
      Object.assign(this, { id, columns, options, rows: [], page: 0, title });
      this.wanted = "";
      this.order = options.order || "";
      this.heading = el("h3", { text: title });
      this.find = el("input", {
        type: "search",
        placeholder: "Filter",
        "aria-label": `Filter: ${title}`,
        on: { input: () => this.filter(this.find.value) },
      });
      this.body = el("tbody");
      this.heads = columns.map((column) =>
        el(
          "th",
          { scope: "col", class: column.numeric ? "numeric" : "" },
          button(column.title, () => this.sort(column.key), { title: column.help || "Sort" }),
        ),
      );
      this.pager = el("div", { class: "pager" });
      this.back = button("Back", () => this.turn(-1));
      this.forth = button("Next", () => this.turn(1));
      this.place = el("span");
      this.pager.append(this.back, this.place, this.forth);
      this.table = el("table", { "data-table": id }, el("thead", {}, el("tr", {}, this.heads)), this.body);
      this.box = el(
        "section",
        { class: "panel table" },
        el("header", {}, this.heading, this.find),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, this.table),
        this.pager,
      );
      container.append(this.box);
    }

    /** Shows other rows. The order, the filter and the page stay. */
    update(rows) {
      this.rows = rows;
      this.draw();
    }

    filter(text) {
      this.wanted = text.toLowerCase();
      this.page = 0;
      this.draw();
    }

    /** Sorts by a column; again turns the order round. */
    sort(key) {
      const now = state.get(`sort.${this.id}`, this.order);
      state.set({ [`sort.${this.id}`]: now === key ? `-${key}` : key });
      this.page = 0;
      this.draw();
    }

    turn(by) {
      this.page += by;
      this.draw();
    }

    /** Returns the rows that the filter leaves, in their order. */
    shown() {
      let rows = this.rows;
      if (this.wanted)
        rows = rows.filter((row) =>
          this.columns.some((column) => String(column.text(row)).toLowerCase().includes(this.wanted)),
        );
      const order = state.get(`sort.${this.id}`, this.order);
      const down = order.startsWith("-");
      const column = this.columns.find((each) => each.key === order.replace(/^-/, ""));
      if (!column) return rows;
      const sign = down ? -1 : 1;
      return [...rows].sort((a, b) => sign * compare(column.value(a), column.value(b)));
    }

    draw() {
      const rows = this.shown();
      const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
      this.page = Math.max(0, Math.min(this.page, pages - 1));
      const first = this.page * PAGE_ROWS;
      const here = rows.slice(first, first + PAGE_ROWS);
      const order = state.get(`sort.${this.id}`, this.order);
      this.columns.forEach((column, i) => {
        const sorted = order.replace(/^-/, "") === column.key;
        set(this.heads[i], { "aria-sort": sorted ? (order.startsWith("-") ? "descending" : "ascending") : "none" });
      });
      while (this.body.children.length > here.length) this.body.lastChild.remove();
      here.forEach((row, i) => this.drawRow(row, i));
      if (!here.length)
        this.body.append(
          el(
            "tr",
            {},
            el("td", {
              colspan: this.columns.length,
              class: "empty",
              text: this.rows.length ? "Nothing matches the filter." : this.options.empty || "None.",
            }),
          ),
        );
      const all = rows.length === this.rows.length ? "" : ` of ${count(this.rows.length)}`;
      this.heading.textContent = `${this.title} (${count(rows.length)}${all})`;
      this.find.hidden = this.rows.length < 8 && !this.wanted;
      this.pager.hidden = pages === 1;
      this.place.textContent = `${count(first + 1)} to ${count(first + here.length)} of ${count(rows.length)}`;
      this.back.disabled = this.page === 0;
      this.forth.disabled = this.page === pages - 1;
    }

    /** Writes a row into the line that is there, so that a table that stands still makes no new nodes. */
    drawRow(row, i) {
      let line = this.body.children[i];
      if (!line || line.children.length !== this.columns.length) {
        const fresh = el(
          "tr",
          {},
          this.columns.map((column) => el("td", { class: column.numeric ? "numeric" : "" })),
        );
        if (line) line.replaceWith(fresh);
        else this.body.append(fresh);
        line = fresh;
        if (this.options.click) line.addEventListener("click", () => this.options.click(line.row));
      }
      line.row = row;
      this.columns.forEach((column, j) => {
        const text = visible(String(column.text(row) ?? "–")).slice(0, 500);
        const kind = `${column.numeric ? "numeric " : ""}${column.class ? column.class(row) : ""}`;
        set(line.children[j], { text, class: kind.trim(), title: text.length > 60 ? text : null });
      });
    }
  }

  /** Compares numbers, texts and lacking values, which come last. */
  function compare(a, b) {
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    if (isNumber(a) && isNumber(b)) return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  /** Makes a column that sorts by `value` and shows it as `show` writes it. */
  function column(key, title, value, show = (shown) => shown, options = {}) {
    return { key, title, value, text: (row) => show(value(row)), ...options };
  }
  const numeric = { numeric: true };
  const prose = { class: () => "prose" }; // a text that may take several lines

  const proofOf = (server) => server.proof || {};

  const SERVER_COLUMNS = [
    column("name", "Server", (s) => s.name),
    column("state", "State", (s) => (s.slow && s.state === "serving" ? "slow" : s.state), undefined, {
      class: (s) => `badge state-${s.slow && s.state === "serving" ? "stale" : s.state}`,
      help: "serving: samples; slow: samples, with engine steps of several seconds; joining, syncing: gets weights; stale: too old to sample; quarantined: its weights failed their proof; draining: leaves; down: does not answer",
    }),
    column(
      "version",
      "Version",
      (s) => s.version,
      (v) => v ?? "–",
      { numeric: true, help: "Of its weights: the optimiser steps that made them" },
    ),
    column(
      "lag",
      "Behind",
      (s) => s.lag,
      (v) => v ?? "–",
      { numeric: true, help: "Versions behind the learner" },
    ),
    column("since", "For", (s) => s.since_s, seconds, { numeric: true, help: "How long it has been in this state" }),
    column(
      "waits",
      "Waits for",
      (s) => s.waits_for,
      (v) => v ?? "nothing",
      prose,
    ),
    column(
      "reason",
      "Reason",
      (s) => s.reason || s.slow,
      (v) => v ?? "–",
      prose,
    ),
    column(
      "transport",
      "Weights by",
      (s) => s.transport,
      (v) => v ?? "–",
      { help: "How new weights travel to it" },
    ),
    column("proof", "Proof", (s) => proofOf(s).max_abs_diff, number, {
      numeric: true,
      help: "Newest proof that held: the largest difference of a log-prob from the learner's, in nats",
    }),
    column("transfer", "Transfer", (s) => proofOf(s).transfer_s, seconds, {
      numeric: true,
      help: "Seconds that the newest weights travelled, during generation",
    }),
    column("pause", "Pause", (s) => proofOf(s).pause_s, seconds, {
      numeric: true,
      help: "Seconds in which generation stood still for the newest weights",
    }),
    column("url", "URL", (s) => s.url),
  ];

  const failuresOf = (worker) =>
    Object.entries(worker.failures || {})
      .map(([why, times]) => `${why} ${times}`)
      .join(", ");

  const WORKER_COLUMNS = [
    column("worker", "Worker", (w) => w.worker_id),
    column(
      "does",
      "Does",
      (w) => w.does,
      (v) => String(v).replaceAll("_", " "),
      {
        class: (w) => `badge does-${w.does}`,
        help: "What most of its open episodes do; quiet: no heartbeat for 25 s; silent: not heard from for a minute; refused: its data would be wrong; left: it has ended",
      },
    ),
    column(
      "why",
      "Why",
      (w) => w.reason || failuresOf(w),
      (v) => v || "–",
      { ...prose, help: "Why it is refused, or its failures" },
    ),
    column("open", "Open", (w) => w.episodes_in_flight, count, { numeric: true, help: "Open episodes" }),
    column("generating", "Generating", (w) => w.episodes_generating, count, {
      numeric: true,
      help: "Episodes for which a server writes an answer now",
    }),
    column("tools_now", "In tools", (w) => w.episodes_in_tools, count, {
      numeric: true,
      help: "Episodes that wait for a tool or an environment",
    }),
    column("judged", "Judged", (w) => w.episodes_in_judgement, count, {
      numeric: true,
      help: "Episodes that wait for their reward",
    }),
    column("done", "Done", (w) => w.episodes_done, count, numeric),
    column("failed", "Failed", (w) => w.episodes_failed, count, {
      numeric: true,
      class: (w) => (w.episodes_failed ? "warn" : ""),
    }),
    column("tokens", "Tokens", (w) => w.tokens_sampled, number, numeric),
    column("calls", "Tool calls", (w) => w.tool_calls, number, numeric),
    column(
      "call_failures",
      "Failed calls",
      (w) => (w.tool_calls ? w.tool_failures / w.tool_calls : 0),
      percent,
      numeric,
    ),
    column("waits", "Idle", (w) => w.wait_share, percent, {
      numeric: true,
      help: "Share of its time in which it could play episodes and the queue gave it no prompt",
    }),
    column(
      "seen",
      "Seen",
      (w) => w.seen_s_ago,
      (v) => `${seconds(v)} ago`,
      numeric,
    ),
    column("host", "Host", (w) => `${w.host}:${w.pid}`),
  ];

  const RANK_COLUMNS = [
    column("rank", "Rank", (r) => r.rank, undefined, { numeric: true, help: "A process of the learner, with a part of each step" }),
    column("busy", "Busy", (r) => r.busy_s, seconds, {
      numeric: true,
      help: "Seconds of the newest step until its last backward pass, in which the ranks exchange gradients",
    }),
    column("wait", "Waited", (r) => r.wait_s, seconds, {
      numeric: true,
      help: "How much longer the slowest rank was busy. Where ranks hold parts of the weights they wait in each layer, which is not seen here",
    }),
    column("step", "Step", (r) => r.step_s, seconds, { numeric: true, help: "Seconds of the whole step" }),
    column("tokens", "Tokens", (r) => r.tokens, number, { numeric: true, help: "That it passed through the model" }),
    column("memory", "Memory", (r) => r.memory_bytes, bytes, {
      numeric: true,
      help: "The most that it held: of its GPU in the step; without one, of the process since its start",
    }),
  ];

  const EVENT_COLUMNS = [
    column(
      "at",
      "Time",
      (e) => e.at,
      (at) => clock(at, true),
    ),
    column("kind", "About", (e) => e.kind, undefined, { class: (e) => `badge event-${e.kind}` }),
    column(
      "who",
      "Who",
      (e) => e.who,
      (v) => v ?? "–",
    ),
    column("text", "What happened", (e) => e.text, undefined, prose),
  ];

  const EVALUATION_COLUMNS = [
    column("step", "Step", (e) => e.step, count, numeric),
    column("reward", "Reward", (e) => e.reward, number, numeric),
    column("best", "Best of group", (e) => e.best, number, numeric),
    column(
      "rows",
      "Rows",
      (e) => e.done,
      (v) => count(v),
      numeric,
    ),
    column("failed", "Failed", (e) => e.failed, count, numeric),
    column("length", "Tokens", (e) => e.mean_length, number, numeric),
    column("seconds", "Took", (e) => e.seconds, seconds, numeric),
    column(
      "versions",
      "Versions",
      (e) => (e.versions ? e.versions[0] : null),
      (v) => v ?? "–",
      numeric,
    ),
    column(
      "ended",
      "State",
      (e) => e.ended,
      (v) => (v ? v.replaceAll("_", " ") : "open"),
    ),
    column(
      "waits",
      "Waits for",
      (e) => e.waits_for,
      (v) => v ?? "–",
      prose,
    ),
  ];

  /** The tables of servers, workers, ranks and evaluations. */
  class Fleet {
    constructor(container) {
      this.servers = new Table(container, "servers", "Servers", SERVER_COLUMNS, { empty: "No server is registered." });
      this.workers = new Table(container, "workers", "Workers", WORKER_COLUMNS, { empty: "No worker is registered." });
      this.ranks = new Table(container, "ranks", "Ranks of the learner", RANK_COLUMNS);
      this.evaluations = new Table(container, "evaluations", "Evaluations", EVALUATION_COLUMNS, { order: "-step" });
    }

    update(page, status) {
      this.servers.update(status ? status.servers : []);
      this.workers.update(status ? status.workers : []);
      const ranks = (status && status.learner.ranks) || [];
      this.ranks.update(ranks);
      this.ranks.box.hidden = ranks.length === 0;
      this.evaluations.update(page.evaluations);
      this.evaluations.box.hidden = page.evaluations.length === 0;
    }
  }

  /** Makes the log of events. `click(event)`: what happens when one is chosen. */
  function eventLog(container, click) {
    return new Table(container, "events", "Events", EVENT_COLUMNS, {
      order: "-at",
      empty: "Nothing has happened yet.",
      click,
    });
  }

  slipstream.tables = { Table, Fleet, eventLog, plural };
})();
