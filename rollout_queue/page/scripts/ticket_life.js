/* A ticket's whole life, as the queue tells it: who had it, at which version, when its group came, what became of it. */
(() => {
  "use strict";
  const { el, state, visible, format } = slipstream;
  const { bytes, clock, count } = format;

  const OPEN = { issued: "it is with the worker", ready: "it waits in the queue", leased: "the learner has it" };

  /** Says how an attempt ended, or where it is. */
  function endOf(life) {
    const why = life.reason ? `: ${life.reason.replaceAll("_", " ").replace(":", ": ")}` : "";
    const step = `trained in step ${life.step}, which made version ${life.trained_version}`;
    if (life.state === "trained") return step + why;
    if (life.state === "forgotten") return `${step}; a checkpoint holds it${why}`;
    if (life.state === "dropped") return `dropped${why}`;
    if (life.state === "reissued") return `given up, and its row is sampled again${why}`;
    if (life.state === "evaluated") return "its result is in the evaluation";
    return OPEN[life.state] || life.state;
  }

  /** Returns [time, text] of what happened in one attempt. */
  function happenings(life) {
    const by = life.sampled_by.map(([server, oldest, newest]) =>
      oldest === newest ? `${server} with version ${oldest}` : `${server} with versions ${oldest} to ${newest}`,
    );
    const came = `its group came at version ${life.arrival_version}: ${count(life.tokens)} tokens, ${bytes(life.bytes)}`;
    const leased = `leased to the learner${life.state === "ready" ? ", and given back" : ""}`;
    return [
      [life.issued_at, `issued to ${life.worker_id} at version ${life.version}`],
      life.arrival_version === null ? null : [life.arrived_at, `${came}, sampled by ${by.join(", ")}`],
      life.leased_at === null && life.state !== "leased" ? null : [life.leased_at, leased],
      [life.ended_at, endOf(life)],
    ].filter(Boolean);
  }

  function attemptOf(life, several) {
    return [
      several ? el("h4", { text: visible(`ticket ${life.id}`) }) : null,
      el(
        "ol",
        {},
        happenings(life).map(([at, text]) => el("li", {}, el("time", { text: clock(at, true) }), el("span", { text: visible(text) }))),
      ),
    ];
  }

  /** Asks the queue and fills `box`. */
  async function fill(box, ticket) {
    const say = (text) => box.replaceChildren(el("p", { class: "dim", text: visible(text) }));
    try {
      const answer = await fetch(`v1/tickets/${encodeURIComponent(ticket)}`, { credentials: "same-origin" });
      const body = await answer.json();
      if (!answer.ok) say(body.message);
      else box.replaceChildren(...body.flatMap((life) => attemptOf(life, body.length > 1)).filter(Boolean));
    } catch {
      say("The queue does not answer.");
    }
  }

  /** Makes the fold with the life of a ticket, which is asked for when it is opened, and stays open for the next. */
  function life(ticket) {
    const box = el("div");
    const fold = el("details", { class: "life" }, el("summary", { text: "the ticket's life" }), box);
    fold.addEventListener("toggle", () => {
      state.set({ life: fold.open ? "1" : null });
      if (fold.open) fill(box, ticket);
    });
    fold.open = state.get("life") === "1";
    return fold;
  }

  slipstream.ticketLife = { life };
})();
