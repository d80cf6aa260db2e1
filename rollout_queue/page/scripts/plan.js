/* A run that is planned: the loop with predicted rates, the predictions next to what the record measured, and a bar for
 * each change. */
(() => {
  "use strict";
  const { el, set, visible, loop } = slipstream;

  class Plan {
    constructor(view) {
      this.limit = el("p", { class: "limit info" });
      this.advice = el("p", { class: "advice" });
      const picture = el("div", { class: "picture" });
      this.staleness = el("p", { class: "dim note" });
      this.figures = el("tbody");
      this.changes = el("tbody");
      this.notes = el("ul", { class: "dim" });
      view.append(
        el("div", { class: "panel" }, this.limit, this.advice, picture, this.staleness),
        el(
          "div",
          { class: "columns" },
          panel("What a change would bring", ["change", "", "gain", "steps/s", "staleness"], this.changes),
          panel("Predicted, and measured", ["", "predicted", "in the record"], this.figures),
        ),
        el("section", { class: "panel" }, el("h3", { text: "What it rests on" }), this.notes),
      );
      this.loop = new loop.Loop(picture);
    }

    draw(page, status) {
      const { plan } = page;
      this.staleness.textContent = `${this.loop.draw(page, status)}.`;
      set(this.limit, { text: visible(status.limit.text) });
      set(this.advice, { text: visible(plan.advice) });
      this.figures.replaceChildren(...plan.figures.map(([name, ...values]) => row(name, values.map(numeric))));
      const most = Math.max(1, ...plan.changes.map((change) => Math.abs(change.gain)));
      this.changes.replaceChildren(
        ...plan.changes.map((change) => {
          const width = `${(100 * Math.abs(change.gain)) / most}%`;
          const bar = el("i", { class: change.gain < 0 ? "worse" : "", style: { width } });
          const values = [change.shown_gain, change.steps_per_s, change.staleness];
          return row(change.text, [el("td", { class: "bar", "aria-hidden": true }, bar), ...values.map(numeric)]);
        }),
      );
      this.notes.replaceChildren(...plan.notes.map((note) => el("li", { text: visible(note) })));
    }
  }

  const numeric = (text) => el("td", { class: "numeric", text: visible(text) });

  const row = (name, cells) => el("tr", {}, el("th", { scope: "row", text: visible(name) }), ...cells);

  function panel(title, columns, body) {
    const head = columns.map((text, i) => el("th", { scope: "col", class: i ? "numeric" : "", text }));
    return el(
      "section",
      { class: "panel" },
      el("h3", { text: title }),
      el("div", { class: "scroll" }, el("table", { class: "plan" }, el("thead", {}, el("tr", {}, ...head)), body)),
    );
  }

  slipstream.Plan = Plan;
})();
