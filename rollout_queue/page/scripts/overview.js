/* The overview: the loop with one sentence on what limits the run, figures, the main charts, and who waits for whom. */
(() => {
  "use strict";
  const { el, svg, set, visible, format, loop, charts, isNumber } = slipstream;
  const { figuresOf, valueAt } = slipstream.source;
  const { count, number, percent, seconds, plural } = format;

  /** Returns what keeps the run from learning, the likeliest cause first. */
  const causesOf = (status) => (status && status.diagnosis) || [];

  /** Says how often a cause or notice was seen, if it was more than once. */
  const recurrence = ({ times, first_s: first }) => (times > 1 ? ` (seen ${count(times)} times in ${seconds(first)})` : "");

  /** Says in one sentence how the run stands: the alarm, else what keeps it from learning, else what limits it. */
  function headlineOf(page, status, at) {
    if (!status) return { text: "No state of the run is known.", severity: "info" };
    if (status.gave_up) return { text: `The run was given up: ${status.gave_up}`, severity: "bad" };
    if (status.stall.stalled) {
      return {
        text: `No optimiser step for ${seconds(status.stall.since_s)}: ${status.stall.why || "nobody knows why"}.`,
        severity: "bad",
      };
    }
    const causes = causesOf(status);
    if (causes.length) return causes[0];
    if (!page.live && !page.plan && at === null && !status.finished) {
      const steps = `${count(status.step)} of ${count(status.total_steps)}`;
      return { text: `The run was stopped after step ${steps}.`, severity: "warn" };
    }
    if (status.finished)
      return { text: `The run has finished after ${plural(status.step, "step")}.`, severity: "info" };
    return limitOf(status) || { text: "What limits the run is not known before a few steps.", severity: "info" };
  }

  /** Returns what limits the run's speed; null where it is not known. */
  const limitOf = (status) =>
    status && status.limit ? { text: status.limit.text, severity: status.limit.part ? "info" : "good" } : null;

  const HELP = {
    Reward: "Mean reward of all episodes of the newest optimiser step",
    Evaluation: "Mean reward of the newest evaluation, on the task's own evaluation data",
    Steps: "Optimiser steps over the last minute, and how long the newest one took with its wait for groups",
    Sampled: "Tokens that the policy wrote on the vLLM servers, a second, over the last minute",
    Trained: "Tokens that the learner trained, a second, over the last minute. Groups whose rewards are all equal teach nothing and are left out",
    Staleness: "How many optimiser steps the weights that sampled a token were behind when it was trained",
    "Learner waits": "Share of the newest steps in which the learner had too few groups to continue",
    "Taught nothing":
      "Share of all sampled tokens whose groups were dropped, most of them because all rewards of the group are equal. In the last minute: of the tokens that were trained or dropped",
    Dropped: "Groups that were not trained, and the commonest reason; zero variance: all rewards of a group are equal",
  };

  /** Tells whether an event is a change to the run: of a setting, tool or reward, or of a process that went or came. */
  const changes = ({ kind, text }) =>
    kind === "change" ||
    (["worker", "server"].includes(kind) && /^(worker|server) .* (went from|came back|was (started|refused)|is not heard)/.test(text));

  class Overview {
    constructor(view) {
      this.limit = el("p", { class: "limit", role: "status" });
      const picture = el("div", { class: "picture" });
      this.staleness = el("p", { class: "dim note" });
      this.tiles = el("div", { class: "tiles" });
      this.more = el("ul", { class: "diagnosis" });
      this.waits = el("ul", { class: "waits" });
      this.notices = el("ul", { class: "notices" });
      this.changes = el("ul", { class: "changes" });
      this.rows = new RowsPanel();
      const headline = el("div");
      view.append(
        el("div", { class: "panel" }, this.limit, picture, this.staleness),
        this.tiles,
        headline,
        el(
          "div",
          { class: "columns" },
          el("section", { class: "panel" }, el("h3", { text: "What limits the run" }), this.more),
          el("section", { class: "panel" }, el("h3", { text: "Who waits for whom" }), this.waits),
          this.rows.box,
          el("section", { class: "panel" }, el("h3", { text: "Notices" }), this.notices),
          el("section", { class: "panel" }, el("h3", { text: "What changed, and at which step" }), this.changes),
        ),
      );
      this.loop = new loop.Loop(picture);
      this.headline = new charts.Charts(headline, ["reward", "staleness", "step_time", "tokens"]);
    }

    /** Draws a moment of the run. `at`: the slider's time, null for the newest. */
    draw(page, status, at) {
      const staleness = this.loop.draw(page, status, at);
      const headline = headlineOf(page, status, at);
      set(this.limit, { text: visible(headline.text), class: `limit ${headline.severity}` });
      const last = !page.live && !page.plan && at === null ? "As the queue last saw the run. " : "";
      this.staleness.textContent = staleness ? `${last}${staleness}.` : "";
      this.headline.update(page, at);
      this.drawTiles(page, status, at);
      this.rows.draw(status && status.rows);
      const limits = [...causesOf(status), limitOf(status) || (causesOf(status).length ? null : headline)];
      list(
        this.more,
        limits.filter(Boolean).map((each) => [each.text + recurrence(each), each.since_s, each.severity]),
        "",
      );
      list(
        this.waits,
        (status ? status.waits : []).map((wait) => [
          `${wait.who} ${wait.count > 1 || /'s episodes$|^groups /.test(wait.who) ? "wait" : "waits"} for ${wait.what}`,
          wait.since_s,
          "",
        ]),
        "Nobody waits.",
      );
      list(
        this.notices,
        (status ? status.notices : [])
          .slice(-20)
          .reverse()
          .map((notice) => [
            `${notice.who ? `${notice.who}: ` : ""}${notice.text}${notice.count > 1 ? ` (by ${count(notice.count)})` : ""}${recurrence(notice)}`,
            notice.since_s,
            "warn",
          ]),
        "Nothing to fix.",
      );
      list(
        this.changes,
        page.events
          .filter((event) => changes(event) && (at === null || event.at <= at))
          .slice(-20)
          .reverse()
          .map((event) => [event.text, event.text.includes("from step") || !isNumber(event.step) ? null : `step ${count(event.step)}`, ""]),
        "No setting, tool, reward, worker or server has changed since the start.",
      );
    }

    drawTiles(page, status, at) {
      const { steps, time } = page;
      const evaluation = valueAt(steps, "eval/reward", at);
      const figures = status ? figuresOf(page, status, at) : {};
      const rates = status ? status.rates : {};
      const trained = rates.tokens_sampled ? rates.tokens_trained / rates.tokens_sampled : null;
      const share = (part, whole) => (whole ? part / whole : null);
      const dropped = status ? Object.values(status.tokens_dropped || {}).reduce((a, b) => a + b, 0) : 0;
      const late = share(rates.tokens_dropped, rates.tokens_dropped + rates.tokens_trained);
      const tiles = status
        ? [
            ["Reward", number(figures.reward), "mean of the newest step", steps.reward],
            [
              "Evaluation",
              number(evaluation),
              "reward",
              (steps["eval/reward"] || []).filter(isNumber),
              evaluation !== null,
            ],
            [
              "Steps",
              `${number(status.rates.steps * 60)} / min`,
              `${seconds(figures.stepTime)} each`,
              time.rate_steps,
            ],
            [
              "Sampled",
              `${number(status.rates.tokens_sampled)} tok/s`,
              `${number(status.tokens_sampled)} in all`,
              time.rate_tokens_sampled,
            ],
            [
              "Trained",
              `${number(status.rates.tokens_trained)} tok/s`,
              `${percent(trained)} of sampled`,
              time.rate_tokens_trained,
            ],
            [
              "Staleness",
              number(figures.staleness, 2),
              `highest ${figures.stalenessMax}, bound ${page.max_staleness ?? status.max_staleness}`,
              steps.staleness_mean || time.staleness_mean,
            ],
            ["Learner waits", percent(figures.learnerWaits), "of its time, for groups", time.learner_wait_share],
            [
              "Taught nothing",
              percent(share(dropped, status && status.tokens_sampled)),
              isNumber(late) ? `${percent(late)} in the last minute` : "of the sampled tokens",
              [],
              dropped > 0,
            ],
            [
              "Dropped",
              count(Object.values(status.drops).reduce((a, b) => a + b, 0)),
              Object.entries(status.drops)
                .sort((a, b) => b[1] - a[1])
                .map(([why]) => why.replaceAll("_", " "))[0] || "no group",
              time.drops_total,
            ],
          ].filter((tile) => tile[4] !== false)
        : [];
      while (this.tiles.children.length > tiles.length) this.tiles.lastChild.remove();
      tiles.forEach(([name, value, note, values], i) => {
        let tile = this.tiles.children[i];
        if (!tile) {
          tile = el(
            "div",
            { class: "tile" },
            el("span", { class: "dim" }),
            el("b"),
            el("small", { class: "dim" }),
            svg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path")),
          );
          this.tiles.append(tile);
        }
        set(tile, { title: HELP[name] });
        set(tile.children[0], { text: name });
        set(tile.children[1], { text: value });
        set(tile.children[2], { text: visible(note) });
        set(tile.children[3].firstChild, { d: sparkline(values || []) });
      });
    }
  }

  /** How the rows of the data set went, with task.order = "learnable": a histogram of their mean rewards. */
  class RowsPanel {
    constructor() {
      this.text = el("p", { class: "dim" });
      this.bars = el("div", { class: "histogram" });
      this.ends = el("p", { class: "dim ends" }, el("span"), el("span"));
      this.box = el(
        "section",
        { class: "panel rows", title: "Rows that were tried, by the mean reward of their newest groups" },
        el("h3", { text: "Rows by mean reward" }),
        this.text,
        this.bars,
        this.ends,
      );
    }

    /** `rows`: of the status; null hides the panel. */
    draw(rows) {
      this.box.hidden = !rows;
      if (!rows) return;
      set(this.text, {
        text: `${count(rows.tried)} of ${plural(rows.rows, "row")} tried; in ${count(rows.teaching)} of them the newest rewards differ, which teaches`,
      });
      const most = Math.max(1, ...rows.histogram);
      while (this.bars.children.length > rows.histogram.length) this.bars.lastChild.remove();
      rows.histogram.forEach((amount, i) => {
        if (!this.bars.children[i]) this.bars.append(el("i"));
        const width = (rows.highest - rows.lowest) / rows.histogram.length;
        const [from, to] = [rows.lowest + i * width, rows.lowest + (i + 1) * width];
        set(this.bars.children[i], {
          title: `${plural(amount, "row")} with a mean reward of ${number(from)} to ${number(to)}`,
          style: { height: `${(100 * amount) / most}%` },
        });
      });
      set(this.ends.children[0], { text: rows.tried ? number(rows.lowest) : "" });
      set(this.ends.children[1], { text: rows.tried ? number(rows.highest) : "" });
    }
  }

  /** Writes [text, seconds or a text, class] as a list, into the nodes that are there. */
  function list(node, rows, empty) {
    if (!rows.length) rows = [[empty, null, "dim"]];
    while (node.children.length > rows.length) node.lastChild.remove();
    rows.forEach(([text, since, kind], i) => {
      if (!node.children[i]) node.append(el("li", {}, el("span"), el("time")));
      set(node.children[i], { class: kind });
      set(node.children[i].children[0], { text: visible(text).slice(0, 2000) });
      set(node.children[i].children[1], { text: isNumber(since) ? seconds(since) : since || "" });
    });
  }

  /** Returns the path of a small line without axes, in a box of 100 by 24. */
  function sparkline(values) {
    const every = Math.max(1, Math.floor(values.length / 100));
    const shown = values.filter((value, i) => isNumber(value) && i % every === 0);
    if (shown.length < 2) return "";
    const [low, high] = [Math.min(...shown), Math.max(...shown)];
    const y = (value) => (high === low ? 12 : 22 - (20 * (value - low)) / (high - low));
    return shown
      .map((value, i) => `${i ? "L" : "M"}${((100 * i) / (shown.length - 1)).toFixed(1)} ${y(value).toFixed(1)}`)
      .join("");
  }

  slipstream.Overview = Overview;
})();
