/* Puts the page together: header, views, banner, sign-in, time slider and keyboard. */
(() => {
  "use strict";
  const { el, set, button, state, theme, visible, format, charts, tables, rollouts, source, chart, isNumber } =
    slipstream;
  const { count, seconds, clock } = format;

  const VIEWS = [
    ["", "Overview"],
    ["charts", "Charts"],
    ["fleet", "Fleet"],
    ["rollouts", "Rollouts"],
  ];
  const KEYS = [
    ["1 to 4", "the four views"],
    ["j and k", "next rollout, and the one before"],
    ["/", "search"],
    ["t", "dark or light"],
    ["[ and ]", "the time slider, to the kept state before or after"],
    ["?", "this help"],
    ["Esc", "closes it"],
  ];

  const PLAYED = 300; // moves of the slider from end to end, ten a second

  const nearestState = (statuses, at) =>
    chart.nearest(
      statuses.map((each) => each[0]),
      at,
    );

  /** Returns for how long a run has been under way at a time (seconds), without the times in which no queue ran. */
  function underWay(page, at) {
    const first = page.time.at[0];
    if (!isNumber(first)) return null;
    const stopped = source.stopsOf(page).reduce((sum, [from, to]) => sum + Math.max(0, Math.min(to, at) - from), 0);
    return Math.max(0, at - first - stopped);
  }

  /** The page. It draws the view that is open, from the data and the view's state. */
  class Page {
    constructor(root) {
      this.root = root;
      this.views = {};
      this.source = new source.Source((what) => this.changed(what));
      this.build();
      state.listen(() => this.draw());
      document.addEventListener("keydown", (event) => this.key(event));
      document.addEventListener("visibilitychange", () => this.draw());
      window.addEventListener("resize", () => this.draw());
      theme.listen(() => this.draw());
      this.source.start();
    }

    build() {
      this.name = el("h1");
      this.pill = el("span", { class: "pill", role: "status" });
      this.progress = el("span", { class: "progress" });
      this.link = el("span", { class: "dim connection" });
      this.tabs = el(
        "nav",
        { "aria-label": "Views" },
        VIEWS.map(([view, text]) => button(text, () => state.set({ view }, true), { "data-view": view })),
      );
      this.themeButton = button("", () => theme.toggle(), { "aria-label": "Dark or light" });
      this.banner = el("div", { class: "banner", role: "alert", hidden: true });
      this.slider = this.buildSlider();
      this.help = el(
        "dialog",
        { "aria-label": "Help" },
        el("h2", { text: "Keys" }),
        el(
          "dl",
          {},
          KEYS.map(([key, text]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text })]),
        ),
        button("Close", () => this.help.close()),
      );
      this.sign = this.buildSignIn();
      this.main = el(
        "main",
        {},
        VIEWS.map(
          ([view]) => (this.views[view] = el("section", { class: `view view-${view || "overview"}`, hidden: true })),
        ),
      );
      this.overview = new slipstream.Overview(this.views[""]);
      this.main.append((this.views.plan = el("section", { class: "view view-overview", hidden: true })));
      this.plan = new slipstream.Plan(this.views.plan);
      const chartBox = el("div");
      const log = el("aside", { class: "log" });
      this.views.charts.append(chartBox, log);
      this.charts = new charts.Charts(chartBox);
      this.log = tables.eventLog(log, (event) => this.charts.moveCursor(this.charts.toX(event.at), null));
      this.fleet = new tables.Fleet(this.views.fleet);
      this.rollouts = new rollouts.Rollouts(this.views.rollouts);
      this.root.append(
        el(
          "header",
          { class: "top" },
          el("div", { class: "brand" }, el("b", { text: "Slipstream" }), this.name, this.pill, this.progress),
          this.link,
          el(
            "div",
            { class: "buttons" },
            this.themeButton,
            button("?", () => this.help.showModal(), { "aria-label": "Help" }),
          ),
          this.tabs,
        ),
        this.banner,
        this.slider,
        this.sign,
        this.main,
        this.help,
      );
    }

    buildSlider() {
      this.range = el("input", {
        type: "range",
        min: 0,
        step: 1,
        "aria-label": "Time",
        on: { input: () => this.slideTo(Number(this.range.value)) },
      });
      this.rangeText = el("output");
      this.play = button("Play", () => (this.playing ? this.stop() : this.start()));
      return el("div", { class: "slider", hidden: true }, this.play, this.range, this.rangeText);
    }

    buildSignIn() {
      const field = el("input", {
        type: "password",
        name: "token",
        autocomplete: "off",
        required: true,
        "aria-label": "Viewer's token",
      });
      const answer = el("p", { class: "bad", role: "alert" });
      const submit = async (event) => {
        event.preventDefault();
        answer.textContent = "";
        const refused = await this.source.signIn(field.value.trim());
        if (refused === null) field.value = "";
        else answer.textContent = visible(refused);
      };
      return el(
        "form",
        { class: "panel sign-in", hidden: true, on: { submit } },
        el("h2", { text: "Sign in" }),
        el("p", { text: "This queue shows its run to those who have a viewer's token." }),
        field,
        el("button", { text: "Sign in" }),
        answer,
      );
    }

    /** Draws once for all changes of a moment; nothing while the tab is not looked at. */
    changed(what) {
      if (what === "connection") return this.drawConnection();
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        this.draw();
      });
    }

    /** Returns [time, status]: of the slider's moment in a report, else the newest. */
    moment() {
      const { statuses, status, now } = this.source.page;
      const at = Number(state.get("at"));
      if (!statuses.length || !state.get("at") || !isNumber(at))
        return [null, status || (statuses.length ? statuses.at(-1)[1] : null), now];
      const i = nearestState(statuses, at);
      return [statuses[i][0], statuses[i][1], statuses[i][0]];
    }

    draw() {
      const page = this.source.page;
      this.drawConnection();
      this.themeButton.textContent = theme.dark() ? "Light" : "Dark";
      if (!page || document.hidden) return;
      const view = page.plan ? "plan" : VIEWS.some(([name]) => name === state.get("view")) ? state.get("view") : "";
      this.tabs.hidden = Boolean(page.plan);
      for (const [name, section] of Object.entries(this.views)) section.hidden = name !== view;
      for (const tab of this.tabs.children) set(tab, { "aria-current": tab.dataset.view === view ? "page" : null });
      const [at, status, now] = this.moment();
      this.drawHeader(page, status, now);
      this.drawSlider(page, at);
      if (view === "plan") this.plan.draw(page, status);
      else if (view === "") this.overview.draw(page, status, at);
      else if (view === "charts") this.drawCharts(page, at);
      else if (view === "fleet") this.fleet.update(page, status);
      else this.rollouts.update(page);
    }

    drawCharts(page, at) {
      this.charts.update(page, at);
      this.log.update(page.events);
    }

    drawHeader(page, status, now) {
      document.title = page.run ? `${page.run} · Slipstream` : "Slipstream";
      this.name.textContent = visible(page.run);
      let [text, kind] = page.live ? ["running", "good"] : [page.plan ? "planned" : "over", ""];
      if (status && status.gave_up) [text, kind] = ["given up", "bad"];
      else if (status && status.stall.stalled) [text, kind] = ["stalled", "bad"];
      else if (status && status.finished) [text, kind] = ["finished", ""];
      set(this.pill, { text, class: `pill ${kind}` });
      const position = status && `step ${count(status.step)} of ${count(status.total_steps)}`;
      const progress = status ? `${position} · version ${count(status.version)} · ${seconds(Math.max(status.uptime_s, underWay(page, now) ?? 0))}` : "";
      this.progress.textContent = page.plan ? visible(page.plan.title) : progress;
    }

    drawConnection() {
      const { state, heardAt, why } = this.source.connection;
      const broke = state === "lost" || state === "polling";
      const status = this.source.page && this.source.page.status;
      // A queue that ends after its run is none that is lost.
      const connection = broke && status && status.finished ? "ended" : state;
      const silent = seconds((Date.now() - heardAt) / 1000);
      const texts = {
        live: "live",
        starting: "loading",
        resting: "loading",
        file: this.source.page && this.source.page.plan ? "plan" : "report",
        ended: "the run is over",
        polling: "reading every 5 s",
        lost: "no connection",
      };
      set(this.link, { text: texts[connection] || "", class: `connection ${connection === "live" ? "good" : "dim"}` });
      this.sign.hidden = connection !== "signed out";
      this.main.hidden = connection === "signed out";
      const broken = broke && connection !== "ended";
      this.banner.hidden = !broken;
      if (broken) {
        const heard = this.source.page
          ? `Nothing has come since ${clock(heardAt / 1000)}, ${silent} ago`
          : "Nothing has come yet";
        set(this.banner, { text: `${heard}: ${why}. What is shown is from then; the page tries again every 5 s.` });
      }
    }

    drawSlider(page, at) {
      const { statuses } = page;
      this.slider.hidden = statuses.length < 2;
      if (this.slider.hidden) return;
      const [first, last] = [statuses[0][0], statuses.at(-1)[0]];
      this.range.max = Math.ceil(last - first);
      const after = (at === null ? last : at) - first;
      // Someone who drags it moves by less than the time between two states.
      const shown = nearestState(statuses, first + Number(this.range.value));
      if (statuses[shown][0] !== first + after) this.range.value = Math.round(after);
      const text = `${clock(first + after, true)} (${seconds(after)} after the start)`;
      set(this.rangeText, { text });
      set(this.range, { "aria-valuetext": text });
    }

    /** Shows the run as it was so many seconds after its first state. */
    slideTo(after) {
      const { statuses } = this.source.page;
      this.slide(nearestState(statuses, statuses[0][0] + after));
    }

    /** Returns the number of the state that is shown. */
    place() {
      const { statuses } = this.source.page;
      const [at] = this.moment();
      return at === null ? statuses.length - 1 : nearestState(statuses, at);
    }

    /** Shows the run as it was at one of its kept states. */
    slide(place) {
      const { statuses } = this.source.page;
      place = Math.max(0, Math.min(statuses.length - 1, place));
      state.set({ at: place === statuses.length - 1 ? null : statuses[place][0] });
    }

    start() {
      const last = this.source.page.statuses.length - 1;
      if (this.place() >= last) this.slide(0);
      this.play.textContent = "Stop";
      this.playing = setInterval(() => {
        const { max, value } = this.range;
        const place = this.place();
        this.slideTo(Number(value) + Number(max) / PLAYED);
        if (this.place() === place) this.slide(place + 1);
        if (this.place() >= last) this.stop();
      }, 100);
    }

    stop() {
      clearInterval(this.playing);
      this.playing = null;
      this.play.textContent = "Play";
    }

    /** Answers the keyboard, except while someone writes. */
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.source.page) return;
      if (event.target.closest("input, select, textarea, dialog[open]")) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      const view = VIEWS[Number(event.key) - 1];
      if (view) state.set({ view: view[0] }, true);
      else if (event.key === "?") this.help.showModal();
      else if (event.key === "t") theme.toggle();
      else if (event.key === "j" || event.key === "k") {
        if (state.get("view") !== "rollouts") state.set({ view: "rollouts" }, true);
        this.rollouts.move(event.key === "j" ? 1 : -1);
      } else if (event.key === "/") {
        event.preventDefault();
        if (state.get("view") === "charts") this.charts.find.focus();
        else {
          state.set({ view: "rollouts" }, true);
          this.rollouts.search.focus();
        }
      } else if ((event.key === "[" || event.key === "]") && !this.slider.hidden) {
        this.slide(this.place() + (event.key === "]" ? 1 : -1));
      }
    }
  }

  slipstream.page = new Page(document.getElementById("root"));
})();
