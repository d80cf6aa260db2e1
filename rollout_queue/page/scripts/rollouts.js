/* The rollout viewer: a list with filters, and next to it one episode, its group, or the same row at other versions. */
(() => {
  "use strict";
  const { el, button, select, state, visible, format, isNumber, conversation, ticketLife } = slipstream;
  const { count, number } = format;

  const PAGE_ROWS = 100;
  const MAX_BESIDE = 16; // episodes side by side
  const FILTERS = ["text", "step0", "step1", "reward0", "reward1", "finish", "worker", "server", "role", "kind", "order"];
  const ORDERS = {
    "": ["newest first", null],
    oldest: ["oldest first", null],
    best: ["highest reward", (view) => -view.reward],
    worst: ["lowest reward", (view) => view.reward],
    advantage: ["largest advantage", (view) => -Math.abs(view.advantage || 0)],
    stale: ["stalest", (view) => -(view.staleness || 0)],
    long: ["most tokens", (view) => -view.sampled_tokens],
  };

  const serversOf = (view) => (Array.isArray(view.servers) ? view.servers.map(String) : []);
  const keyOf = (view) => `${view.ticket_id}/${view.number}`;

  /** Tells whether a text occurs anywhere in a value of JSON. */
  function contains(value, text) {
    if (typeof value === "string") return value.toLowerCase().includes(text);
    if (Array.isArray(value)) return value.some((each) => contains(each, text));
    if (value && typeof value === "object") return Object.values(value).some((each) => contains(each, text));
    return isNumber(value) && String(value) === text;
  }

  /** Returns the rollouts that the filters in the view's state leave, in their order. */
  function filtered(rollouts) {
    const get = (name) => state.get(`f.${name}`);
    const bounds = (name) => [
      get(`${name}0`) === "" ? -Infinity : Number(get(`${name}0`)),
      get(`${name}1`) === "" ? Infinity : Number(get(`${name}1`)),
    ];
    const [step, reward, text] = [bounds("step"), bounds("reward"), get("text").toLowerCase()];
    const within = (value, [low, high]) =>
      (low === -Infinity && high === Infinity) || (isNumber(value) && value >= low && value <= high);
    const found = rollouts.filter((view) => {
      const evaluation = view.evaluation !== null && view.evaluation !== undefined;
      return (
        within(evaluation ? view.evaluation : view.step, step) &&
        within(view.reward, reward) &&
        (!get("finish") || view.finish_reason === get("finish")) &&
        (!get("worker") || view.worker_id === get("worker")) &&
        (!get("server") || serversOf(view).includes(get("server"))) &&
        (!get("role") || view.role === get("role")) &&
        (!get("kind") || (get("kind") === "evaluation") === evaluation) &&
        (!text || [view.messages, view.extra, view.ticket_id].some((value) => contains(value, text)))
      );
    });
    const order = ORDERS[get("order")] || ORDERS[""];
    if (get("order") !== "oldest") found.reverse();
    return order[1] ? found.sort((a, b) => order[1](a) - order[1](b)) : found;
  }

  /** Returns a line of the rollout's last words. */
  function gist(view) {
    const messages = Array.isArray(view.messages) ? view.messages : [];
    const text = (part) => (part && typeof part.text === "string" ? part.text : `[${part && part.type}]`);
    const words = (message) => {
      const content = (message && message.content) || "";
      return (Array.isArray(content) ? content.map(text).join(" ") : String(content)).trim();
    };
    const end = words(messages.at(-1));
    const asked = words(messages.find((message) => message && message.role === "user"));
    return visible(`${asked.slice(0, 80)} → ${end.slice(0, 80) || "(no text)"}`).replace(/\s+/g, " ");
  }

  class Rollouts {
    constructor(container) {
      this.shown = [];
      this.page = 0;
      this.list = el("ul", { class: "rollouts", role: "listbox", "aria-label": "Rollouts", tabindex: 0 });
      this.amount = el("p", { class: "dim", role: "status" });
      this.pager = el(
        "div",
        { class: "pager" },
        button("Back", () => this.turn(-1)),
        button("Next", () => this.turn(1)),
      );
      this.detail = el("div", { class: "detail" });
      this.form = el("form", { class: "filters", on: { submit: (event) => event.preventDefault() } });
      this.choices = "";
      container.append(
        el("div", { class: "viewer" }, el("aside", {}, this.form, this.amount, this.list, this.pager), this.detail),
      );
      this.list.addEventListener("click", (event) => {
        const item = event.target.closest("[data-key]");
        if (item) this.choose(item.dataset.key, true);
      });
      this.list.addEventListener("keydown", (event) => {
        const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (by) {
          event.preventDefault();
          this.move(by);
        }
      });
    }

    /** Takes new data; the one that is read stays as it is unless it has changed itself. */
    update(page) {
      this.rollouts = page.rollouts;
      this.drawForm();
      this.shown = filtered(page.rollouts);
      this.drawList();
      this.drawDetail(page);
    }

    /** Writes the filters, again only when there are other choices. */
    drawForm() {
      const finish = [...new Set(this.rollouts.map((view) => String(view.finish_reason)))].sort();
      const workers = [...new Set(this.rollouts.map((view) => String(view.worker_id)))].sort().slice(0, 500);
      const servers = [...new Set(this.rollouts.flatMap(serversOf))].sort().slice(0, 500);
      const roles = [...new Set(this.rollouts.map((view) => view.role).filter(Boolean))].sort();
      const choices = JSON.stringify([finish, workers, servers, roles]);
      const active = this.form.contains(document.activeElement) ? document.activeElement : null;
      if (choices !== this.choices && !active) {
        this.choices = choices;
        const pick = (name) => (value) => this.filter({ [name]: value });
        const among = (name, label, names) =>
          select(
            label,
            [["", `any ${name}`], ...names.map((each) => [each, visible(each)])],
            state.get(`f.${name}`),
            pick(name),
          );
        const field = (name, label, type) =>
          el("input", {
            type,
            name,
            placeholder: label,
            "aria-label": label,
            step: "any",
            on: { input: (event) => this.filter({ [name]: event.target.value }) },
          });
        this.search = field("text", "Search in texts ( / )", "search");
        this.form.replaceChildren(
          this.search,
          el("div", {}, field("step0", "step from", "number"), field("step1", "step to", "number")),
          el("div", {}, field("reward0", "reward from", "number"), field("reward1", "reward to", "number")),
          el(
            "div",
            {},
            select(
              "Finish reason",
              [["", "any end"], ...finish.map((each) => [each, visible(each)])],
              state.get("f.finish"),
              pick("finish"),
            ),
            select(
              "Kind",
              [
                ["", "all kinds"],
                ["training", "training"],
                ["evaluation", "evaluation"],
              ],
              state.get("f.kind"),
              pick("kind"),
            ),
          ),
          el("div", {}, among("worker", "Worker", workers), among("server", "Server", servers)),
          roles.length ? el("div", {}, among("role", "Role", roles)) : "",
          select(
            "Order",
            Object.entries(ORDERS).map(([value, [text]]) => [value, text]),
            state.get("f.order"),
            pick("order"),
          ),
          button("Clear filters", () => this.clear(), { class: "clear" }),
        );
      }
      for (const input of this.form.querySelectorAll("input"))
        if (input !== active) input.value = state.get(`f.${input.name}`);
      this.form.querySelector(".clear").hidden = !FILTERS.some((name) => state.get(`f.${name}`));
    }

    filter(changes) {
      this.page = 0;
      state.set(Object.fromEntries(Object.entries(changes).map(([name, value]) => [`f.${name}`, value])));
    }

    clear() {
      this.choices = "";
      this.filter(Object.fromEntries(FILTERS.map((name) => [name, null])));
    }

    turn(by) {
      this.page += by;
      this.drawList();
    }

    drawList() {
      const pages = Math.max(1, Math.ceil(this.shown.length / PAGE_ROWS));
      this.page = Math.max(0, Math.min(this.page, pages - 1));
      const here = this.shown.slice(this.page * PAGE_ROWS, (this.page + 1) * PAGE_ROWS);
      const chosen = state.get("rollout");
      this.amount.textContent = this.rollouts.length
        ? `${count(this.shown.length)} of ${count(this.rollouts.length)} rollouts`
        : "No rollout has arrived yet.";
      while (this.list.children.length > here.length) this.list.lastChild.remove();
      here.forEach((view, i) => {
        let item = this.list.children[i];
        if (!item) {
          item = el("li", { role: "option" }, el("b"), el("span", { class: "where" }), el("span", { class: "gist" }));
          this.list.append(item);
        }
        const when =
          view.evaluation === null || view.evaluation === undefined
            ? `step ${view.step ?? "–"}`
            : `evaluation ${view.evaluation}`;
        slipstream.set(item, { "data-key": keyOf(view), "aria-selected": String(keyOf(view) === chosen) });
        slipstream.set(item.children[0], { text: number(view.reward), class: view.reward > 0 ? "good" : "bad" });
        const where = [when, view.role, `row ${view.index}`, view.finish_reason].filter(Boolean).join(" · ");
        slipstream.set(item.children[1], { text: visible(where) });
        slipstream.set(item.children[2], { text: gist(view) });
      });
      this.pager.hidden = pages === 1;
      this.pager.children[0].disabled = this.page === 0;
      this.pager.children[1].disabled = this.page === pages - 1;
    }

    /** Chooses a rollout; on a phone its text is brought into view. */
    choose(key, scroll = false) {
      state.set({ rollout: key });
      if (scroll && window.matchMedia("(max-width: 760px)").matches) this.detail.scrollIntoView({ block: "start" });
    }

    /** Goes to the next rollout of the list, or the one before. */
    move(by) {
      const now = this.shown.findIndex((view) => keyOf(view) === state.get("rollout"));
      const next = this.shown[now < 0 ? 0 : Math.max(0, Math.min(this.shown.length - 1, now + by))];
      if (!next) return;
      this.page = Math.floor(this.shown.indexOf(next) / PAGE_ROWS);
      this.choose(keyOf(next));
      const item = this.list.querySelector('[aria-selected="true"]');
      if (item) item.scrollIntoView({ block: "nearest" });
    }

    /** Shows the chosen rollout: alone, in its group, or next to the same row at other versions. */
    drawDetail(page) {
      const view = this.rollouts.find((each) => keyOf(each) === state.get("rollout"));
      if (!view) {
        this.views = null;
        const text = state.get("rollout") ? "This rollout is no longer kept." : "Choose a rollout, or press j and k.";
        this.detail.replaceChildren(el("p", { class: "empty", text }));
        return;
      }
      const group = this.rollouts
        .filter((each) => each.ticket_id === view.ticket_id)
        .sort((a, b) => a.number - b.number);
      const evaluated = (each) => each.evaluation !== null && each.evaluation !== undefined;
      const row = this.rollouts
        .filter((each) => each.index === view.index && evaluated(each) === evaluated(view))
        .sort((a, b) => (a.versions ? a.versions[0] : 0) - (b.versions ? b.versions[0] : 0));
      const as = { group, row }[state.get("as")] ? state.get("as") : "";
      const views = (as ? { group, row }[as] : [view]).slice(-MAX_BESIDE);
      const same = this.views && this.views.length === views.length && views.every((each, i) => each === this.views[i]);
      if (
        same &&
        this.as === as &&
        this.colour === state.get("colour") &&
        this.amounts === `${group.length} ${row.length}`
      )
        return;
      Object.assign(this, { views, as, colour: state.get("colour"), amounts: `${group.length} ${row.length}` });
      const choice = (value, text) =>
        button(text, () => state.set({ as: value }), { "aria-pressed": String(as === value) });
      const note = (each) => {
        const version = each.versions ? `version ${each.versions[0]}` : "no version";
        return [each.role, version, isNumber(each.step) ? `step ${each.step}` : null, `episode ${each.number}`]
          .filter(Boolean)
          .join(" · ");
      };
      this.detail.replaceChildren(
        el(
          "div",
          { class: "tools" },
          el(
            "span",
            { class: "choice", role: "group", "aria-label": "What is shown" },
            choice("", "Episode"),
            choice("group", `Its group (${group.length})`),
            choice("row", `Same row (${row.length})`),
          ),
        ),
        page.live && as !== "row" ? ticketLife.life(view.ticket_id) : "",
        el(
          "div",
          { class: views.length > 1 ? "beside" : "alone" },
          views.map((each) => conversation.episode(each, note(each), page.max_staleness)),
        ),
      );
    }
  }

  slipstream.rollouts = { Rollouts, filtered };
})();
