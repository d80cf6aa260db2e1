/* Where the page's data comes from: the script element of a report, or the queue, live. It holds PageData in bounded
 * arrays, applies events to it, and says how long nothing has come. */
(() => {
  "use strict";
  const { isNumber } = slipstream;

  const LIMITS = { time: 2000, steps: 4000, events: 1000, evaluations: 500, rollouts: 1000, rolloutBytes: 32e6 };
  // Milliseconds. A stream that is silent for so long is taken for broken; a tab hidden for so long ends its own.
  const TIMES = { poll: 5000, silent: 30000, hidden: 30000 };

  const EVENTS = ["status", "time", "step", "event", "rollouts"];

  const sizes = new WeakMap(); // characters of each rollout that came live

  /** Returns the text of a report's data: JSON, or packed by gzip and in base64. */
  async function unpacked(element) {
    const text = element.textContent;
    if (element.dataset.encoding !== "gzip") return text;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  /** Returns PageData with every part that the page reads. */
  function complete(page) {
    return {
      run: "",
      live: false,
      now: Date.now() / 1000,
      max_staleness: null,
      group_size: null,
      groups_per_step: null,
      status: null,
      statuses: [],
      time: {},
      steps: {},
      events: [],
      rollouts: [],
      evaluations: [],
      compare: null,
      plan: null,
      ...page,
      time: { at: [], ...(page.time || {}) },
      steps: { step: [], at: [], ...(page.steps || {}) },
    };
  }

  /** Returns a column's value at a time (seconds), or its last where that is null; null where none is known. */
  function valueAt(columns, name, at) {
    const values = columns[name] || [];
    for (let i = values.length - 1; i >= 0; i--)
      if (isNumber(values[i]) && (at === null || columns.at[i] <= at)) return values[i];
    return null;
  }

  /**
   * Returns the figures that several parts of the page show, so that these never differ: those that charts draw, else
   * the status's. `at`: the slider's time, null for the newest.
   */
  function figuresOf(page, status, at) {
    const own = (name, otherwise) => valueAt(page.steps, name, at) ?? otherwise;
    const known = own("staleness_mean", null) !== null;
    return {
      reward: own("reward", status.learner.reward_mean),
      stepTime: own("step_time", status.learner.step_s),
      staleness: known ? own("staleness_mean") : status.staleness.mean,
      stalenessMax: known ? own("staleness_max", status.staleness.max) : status.staleness.max,
      stalenessOf: known ? "of the newest step" : "of the newest steps",
      learnerWaits: status.learner.wait_share ?? status.learner_wait_share,
      workers: status.workers.filter((worker) => !["left", "silent", "refused"].includes(worker.does)),
      rates: status.rates,
    };
  }

  /** Returns [from, to] of each time in which no queue ran: from the last that is known before one started. */
  function stopsOf(page) {
    const { at } = page.time;
    const usual = at.length > 2 ? (at.at(-1) - at[0]) / at.length : 1;
    const found = [];
    const known = [...at, ...page.events.map((event) => event.at)].filter(isNumber).sort((a, b) => a - b);
    for (const event of page.events) {
      if (event.kind !== "run" || event.text !== "the queue started") continue;
      const before = known.filter((time) => time < event.at).at(-1);
      if (before !== undefined && event.at - before > Math.max(15, 5 * usual)) found.push([before, event.at]);
    }
    return found;
  }

  /** Appends a row to columns of equal length. A new column starts with nulls. */
  function appendRow(columns, key, row, limit) {
    const length = columns[key].length;
    for (const name of Object.keys(row)) if (!(name in columns)) columns[name] = new Array(length).fill(null);
    for (const [name, values] of Object.entries(columns)) values.push(name in row ? row[name] : null);
    if (length + 1 > limit) thin(columns, length + 1);
  }

  /** Leaves out every second row of the older half, so that old times stay visible, more coarsely. */
  function thin(columns, length) {
    const half = Math.floor(length / 2);
    for (const [name, values] of Object.entries(columns)) {
      columns[name] = values.filter((_, i) => i >= half || i % 2 === 0);
    }
  }

  /** Puts a step's row in; a step that a resumed run makes again replaces the old line of it. */
  function appendStep(steps, row) {
    const again = steps.step.findIndex((step) => step >= row.step);
    if (isNumber(row.step) && again >= 0) for (const values of Object.values(steps)) values.length = again;
    appendRow(steps, "step", row, LIMITS.steps);
  }

  /** Puts a status in, and its evaluations next to the earlier ones. */
  function takeStatus(page, status) {
    page.status = status;
    const evaluations = new Map([...page.evaluations, ...status.evaluations].map((each) => [each.step, each]));
    page.evaluations = [...evaluations.values()].slice(-LIMITS.evaluations);
  }

  /** Adds an event, unless the page held it already. */
  function appendEvent(page, event) {
    const text = JSON.stringify([event.at, event.who, event.text]);
    const known = page.events.slice(-50).some((each) => JSON.stringify([each.at, each.who, each.text]) === text);
    if (!known) page.events = page.events.concat([event]).slice(-LIMITS.events);
  }

  /** Adds new rollouts; what stands for the same one (by ticket and number) is replaced. Old ones go. */
  function appendRollouts(page, found, characters) {
    const each = characters / Math.max(1, found.length);
    const keyOf = (view) => `${view.ticket_id}/${view.number}`;
    const fresh = new Set(found.map(keyOf));
    for (const view of found) sizes.set(view, each);
    const all = page.rollouts.filter((view) => !fresh.has(keyOf(view))).concat(found);
    let total = 0;
    let first = all.length;
    while (first > 0 && all.length - first < LIMITS.rollouts) {
      total += sizes.get(all[first - 1]) || 0;
      if (total > LIMITS.rolloutBytes && first < all.length) break;
      first -= 1;
    }
    page.rollouts = all.slice(first);
  }

  /** Puts rollouts that the page had before those that it has now. */
  function keepRollouts(page, before) {
    const now = page.rollouts;
    page.rollouts = before;
    appendRollouts(page, now, 0);
  }

  /** Holds PageData, and calls `listener(what)` after each change; `what` names the part of the page's data. */
  class Source {
    constructor(listener) {
      this.listener = listener;
      this.page = null;
      this.connection = { state: "starting", heardAt: Date.now(), why: "" };
      this.stream = null;
      this.timer = null;
    }

    /** Begins with what the file holds, or with the queue. */
    start() {
      const embedded = document.getElementById("data");
      if (embedded) {
        unpacked(embedded).then((text) => {
          this.page = complete(JSON.parse(text));
          this.connection.state = "file";
          this.listener("page");
        });
        return;
      }
      this.load();
      setInterval(() => this.watch(), 1000);
      window.addEventListener("pagehide", () => this.rest());
      window.addEventListener("pageshow", (event) => event.persisted && this.wake());
      document.addEventListener("visibilitychange", () => {
        clearTimeout(this.hiding);
        if (document.hidden) this.hiding = setTimeout(() => this.rest(), TIMES.hidden);
        else this.wake();
      });
    }

    /**
     * Opens the stream of events, and then reads the whole page: what comes meanwhile is held until the page is there.
     * Without a stream the page is read all the same, and both are tried again in 5 s.
     */
    load() {
      clearTimeout(this.timer);
      this.close();
      this.held = [];
      const stream = (this.stream = new EventSource("v1/live"));
      for (const name of EVENTS) stream.addEventListener(name, (event) => this.take(name, event.data));
      stream.onopen = () => this.read(true);
      stream.onerror = () => {
        const was = this.connection.state === "live" ? "the live stream broke off" : "the live stream does not open";
        this.close();
        this.read(false, was);
      };
    }

    /** Reads the page's data. `why`: why there is no stream next to it. */
    async read(streaming, why = "") {
      const { stream } = this;
      try {
        const answer = await fetch("v1/page", { credentials: "same-origin", signal: AbortSignal.timeout(4 * TIMES.poll) });
        if (answer.status === 401) return this.connect("signed out", "");
        if (!answer.ok) throw new Error(`the queue answered ${answer.status}`);
        const before = this.page;
        this.page = complete(await answer.json());
        // A queue that was started again has forgotten rollouts that were not trained yet.
        if (before && before.run === this.page.run) keepRollouts(this.page, before.rollouts);
        this.connection.heardAt = Date.now();
        this.listener("page");
        if (!this.page.live) return this.connect("ended", "");
        if (streaming && stream !== this.stream) return; // it broke meanwhile, and was answered by another reading
        this.connect(streaming ? "live" : "polling", why);
        const held = this.held || [];
        this.held = null;
        for (const [name, text] of held) this.take(name, text);
        if (streaming) return;
      } catch (error) {
        const silent = ["TypeError", "TimeoutError", "AbortError"].includes(error.name);
        this.close();
        const text = error.name === "Error" ? error.message : "the queue's answer could not be read";
        this.connect("lost", silent ? "the queue does not answer" : text);
      }
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.load(), TIMES.poll);
    }

    close() {
      if (this.stream) this.stream.close();
      this.stream = null;
    }

    /** Gives up the stream while nobody looks: a browser has six connections to a queue for all of its tabs. */
    rest() {
      if (["signed out", "ended"].includes(this.connection.state)) return;
      clearTimeout(this.timer);
      this.close();
      this.connect("resting", "");
    }

    wake() {
      if (this.connection.state === "resting") this.load();
    }

    connect(state, why) {
      if (state === "signed out" || state === "ended") this.close();
      Object.assign(this.connection, { state, why });
      this.listener("connection");
    }

    /** Gives up a stream that says nothing, and keeps the banner's seconds going. */
    watch() {
      const silent = Date.now() - this.connection.heardAt;
      if (this.stream && this.connection.state === "live" && silent > TIMES.silent) {
        this.close();
        this.connect("polling", "the live stream has fallen silent");
        this.read(false, "the live stream has fallen silent");
      }
      if (this.connection.state !== "live") this.listener("connection");
    }

    /** Applies one event of the stream. One that cannot be read is passed over, and named in the banner. */
    take(name, text) {
      this.connection.heardAt = Date.now();
      if (this.held) return void this.held.push([name, text]);
      const { page } = this;
      let value;
      try {
        value = JSON.parse(text);
      } catch {
        this.connection.why = `an event "${name}" could not be read`;
        return;
      }
      if (name === "status") takeStatus(page, value);
      else if (name === "time" && value.at <= page.time.at.at(-1))
        return; // the page held it already
      else if (name === "time") appendRow(page.time, "at", value, LIMITS.time);
      else if (name === "step") appendStep(page.steps, value);
      else if (name === "event") appendEvent(page, value);
      else appendRollouts(page, value, text.length);
      if (isNumber(value.at)) page.now = Math.max(page.now, value.at);
      this.listener(name);
    }

    /** Asks for a viewer's cookie. Returns null, or why the token was refused. */
    async signIn(token) {
      try {
        const answer = await fetch("v1/sign-in", {
          method: "POST",
          credentials: "same-origin",
          headers: { "content-type": "application/json" },
          body: JSON.stringify({ token }),
          signal: AbortSignal.timeout(4 * TIMES.poll),
        });
        if (answer.ok) {
          this.connect("starting", "");
          this.load();
          return null;
        }
        const body = await answer.json().catch(() => ({}));
        return body.message || `The queue answered ${answer.status}.`;
      } catch {
        return "The queue does not answer.";
      }
    }
  }

  slipstream.source = { Source, LIMITS, TIMES, appendRow, appendStep, figuresOf, stopsOf, valueAt };
})();
