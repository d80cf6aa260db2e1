/* One rollout, or several side by side: its figures, its conversation with reasoning, tool calls and results, and its
 * tokens, coloured. Everything in it comes from a policy, a tool or a task: it is only ever put in as text. */
(() => {
  "use strict";
  const { el, button, select, state, longText, visible, format, isNumber } = slipstream;
  const { count, number } = format;

  const MAX_MESSAGES = 200; // that are shown at once
  const MAX_TOKENS = 3000;

  const KEPT = new Set([
    "role",
    "name",
    "content",
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_call_id",
    "turn_reward",
  ]);

  /** Returns JSON for people; what cannot be written as such, as text. */
  function json(value) {
    if (typeof value === "string") return value;
    try {
      return JSON.stringify(value, null, 1) ?? String(value);
    } catch {
      return String(value);
    }
  }

  function fold(title, className, open, ...children) {
    return el("details", { class: className, open }, el("summary", { text: visible(title) }), ...children);
  }

  const PREVIEW = /^data:image\/jpeg;base64,[A-Za-z0-9+/=]+$/;

  /** Shows an image by its preview, with its size. */
  function imageOf(image) {
    const known = image && isNumber(image.width) && isNumber(image.height);
    const title = known ? `image of ${image.width} x ${image.height} pixels, ${image.tokens} tokens` : "[image]";
    if (!known || typeof image.preview !== "string" || !PREVIEW.test(image.preview)) return longText(title);
    return el("img", { class: "seen", src: image.preview, alt: title, title });
  }

  /** Shows a message's content: a text, or parts of several kinds. */
  function contentOf(content) {
    if (content === null || content === undefined || content === "") return [];
    if (!Array.isArray(content)) return [longText(json(content))];
    return content.map((part) => {
      if (part && part.type === "image") return imageOf(part.image);
      return longText(part && typeof part.text === "string" ? part.text : json(part));
    });
  }

  /** Shows one call of a tool: its name, and each argument. */
  function callOf(call) {
    const made = (call && call.function) || call || {};
    let given = made.arguments;
    if (typeof given === "string") {
      try {
        given = JSON.parse(given);
      } catch {
        // A call that could not be read is shown as it was written.
      }
    }
    const fields =
      given && typeof given === "object" && !Array.isArray(given)
        ? Object.entries(given).map(([name, value]) =>
            el("div", { class: "argument" }, el("b", { text: visible(name) }), longText(json(value), "span")),
          )
        : [longText(json(given ?? ""))];
    return fold(`calls ${made.name || "a tool"}`.slice(0, 200), "call", true, ...fields);
  }

  function messageOf(message) {
    if (message === null || typeof message !== "object") message = { role: "unknown", content: message };
    const role = String(message.role || "unknown");
    const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
    const reasoning = message.reasoning_content || message.reasoning || message.thinking;
    const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
    const rest = Object.entries(message).filter(([name, value]) => !KEPT.has(name) && value !== null && value !== "");
    const named = (message.name ? `${role} ${message.name}` : role).slice(0, 200);
    const title = isNumber(message.turn_reward) ? `${named}, reward ${number(message.turn_reward)}` : named;
    const parts = [
      reasoning ? fold("reasoning", "reasoning", false, longText(json(reasoning))) : null,
      ...contentOf(message.content),
      ...calls.slice(0, 50).map(callOf),
      rest.length ? fold("other fields", "rest", false, longText(json(Object.fromEntries(rest)))) : null,
    ].filter(Boolean);
    if (known === "tool") return fold(`${title} answers`, "message tool", true, ...parts);
    return el(
      "div",
      { class: `message ${known}` },
      el("header", { text: visible(title) }),
      ...(parts.length ? parts : [el("div", { class: "dim", text: "(empty)" })]),
    );
  }

  /** Makes an element that shows `limit` of the items, and a button for the next ones. */
  function some(items, limit, make, className, noun) {
    const box = el("div", { class: className });
    let shown = 0;
    const more = button("", () => add(), { class: "more" });
    const add = () => {
      const next = items.slice(shown, shown + limit);
      shown += next.length;
      more.before(...next.map((item, i) => make(item, shown - next.length + i)));
      if (shown >= items.length) more.remove();
      else more.textContent = `show more (${count(items.length - shown)} ${noun})`;
    };
    box.append(more);
    add();
    return box;
  }

  const COLOURS = [
    ["", "plain"],
    ["version", "version"],
    ["logprob", "log-prob"],
    ["learner", "learner's log-prob"],
    ["ratio", "ratio"],
    ["advantage", "advantage"],
    ["mask", "mask"],
  ];
  const EXPLAINED = {
    version: "Each colour is a policy version.",
    logprob: "The redder, the less likely it was for the policy that sampled it.",
    learner: "The redder, the less likely it was for the learner.",
    ratio: "Blue: more likely for the learner than for the sampler. Red: less likely. Plain: equal.",
    advantage: "Green tokens are made likelier, red ones less likely. Plain: they do not train.",
    mask: "Green tokens train, grey ones do not.",
  };

  /** Returns the background of a token of a rollout. `versions`: those of the rollout, rising. */
  function shade([, version, logprob, learner, trained, own], by, versions, view) {
    const tint = (name, share) =>
      `color-mix(in srgb, var(${name}) ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;
    if (by === "version") return tint(`--series-${(versions.indexOf(version) % 10) + 1}`, 0.45);
    if (by === "mask") return trained ? tint("--good", 0.35) : tint("--dim", 0.3);
    if (by === "advantage") {
      const advantage = own ?? view.advantage;
      if (!trained || !advantage) return "";
      return tint(advantage > 0 ? "--good" : "--bad", 0.1 + Math.abs(advantage) / 2);
    }
    if (by === "ratio") {
      if (!isNumber(logprob) || !isNumber(learner)) return "";
      return tint(learner > logprob ? "--accent" : "--bad", Math.abs(learner - logprob) / Math.LN2);
    }
    const value = by === "learner" ? learner : logprob;
    return isNumber(value) ? tint("--bad", -value / 5) : "";
  }

  /** Says a token's figures. `advantage`: its rollout's, which a token that trains has unless its turn has its own. */
  function figuresOf([text, version, logprob, learner, trained, own], advantage) {
    const ratio = isNumber(logprob) && isNumber(learner) ? Math.exp(learner - logprob) : null;
    const said = [
      `"${String(text).slice(0, 80)}"`,
      `version ${version ?? "–"}`,
      `log-prob ${number(logprob)}`,
      `learner's ${number(learner)}`,
      `ratio ${number(ratio)}`,
      trained ? `trains  advantage ${number(own ?? advantage)}` : "does not train",
    ];
    return visible(said.join("  "));
  }

  /** Shows a rollout's tokens in colour, with their figures on hover. */
  function tokensOf(view) {
    const tokens = view.tokens;
    const by = state.get("colour");
    const versions = [...new Set(tokens.map((token) => token[1]))].sort((a, b) => a - b);
    const figures = el("div", { class: "figures", role: "status", text: EXPLAINED[by] || "Point at a token." });
    const show = (event) => {
      const token = event.target.closest("[data-token]");
      figures.textContent = token
        ? figuresOf(tokens[Number(token.dataset.token)], view.advantage)
        : EXPLAINED[by] || "Point at a token.";
    };
    const box = some(
      tokens,
      MAX_TOKENS,
      (token, i) =>
        el("span", {
          "data-token": i,
          style: by ? { background: shade(token, by, versions, view) } : {},
          text: visible(String(token[0]).slice(0, 500)).replaceAll("\n", "↵\n"),
        }),
      "tokens",
      "tokens",
    );
    box.addEventListener("pointerover", show);
    box.addEventListener("pointerleave", () => (figures.textContent = EXPLAINED[by] || "Point at a token."));
    return fold(
      `tokens (${count(tokens.length)})`,
      "tokenbox",
      true,
      el(
        "label",
        { class: "tools" },
        "Colour by ",
        select("Colour tokens by", COLOURS, by, (value) => state.set({ colour: value })),
      ),
      figures,
      box,
    );
  }

  /** Returns the figures of a rollout: [name, value, class]. `bound`: the run's on staleness, null if not known. */
  function factsOf(view, bound) {
    const masked = isNumber(view.staleness) && isNumber(bound) && view.staleness > bound;
    const rewards = Object.entries(view.reward_components || {});
    const versions = view.versions
      ? view.versions[0] === view.versions[1]
        ? view.versions[0]
        : `${view.versions[0]} to ${view.versions[1]}`
      : "–";
    return [
      ...(view.role ? [["role", view.role]] : []),
      ["reward", number(view.reward), "reward"],
      ...(rewards.length > 1 ? rewards.map(([name, value]) => [`reward ${name}`, number(value)]) : []),
      ["advantage", number(view.advantage), "advantage"],
      view.evaluation === null || view.evaluation === undefined
        ? ["step", view.step ?? "–"]
        : ["evaluation of step", view.evaluation],
      ["version", versions],
      ["staleness", masked ? `${view.staleness}, tokens above ${bound} masked` : (view.staleness ?? "–")],
      ["ends by", String(view.finish_reason).replaceAll("_", " ")],
      ["turns", view.turns],
      ["tool calls", view.tool_failures ? `${view.tool_calls} (${view.tool_failures} failed)` : view.tool_calls],
      ["tokens", count(view.sampled_tokens)],
      ["row", view.index],
      ["epoch", view.epoch],
      ["worker", view.worker_id],
      ...((view.servers || []).length ? [["server", view.servers.join(", ")]] : []),
      ["ticket", view.ticket_id],
    ];
  }

  /** Shows one rollout. `note`: what sets it apart from those next to it. `bound`: as of `factsOf`. */
  function episode(view, note, bound) {
    const facts = el(
      "dl",
      { class: "facts" },
      factsOf(view, bound).map(([name, value, kind]) =>
        el(
          "div",
          { "data-fact": name },
          el("dt", { text: visible(name) }),
          el("dd", { class: kind || "", text: visible(value) }),
        ),
      ),
    );
    const messages = Array.isArray(view.messages) ? view.messages : null;
    const extra = Object.entries(view.extra || {});
    return el(
      "article",
      { class: "episode", "data-episode": `${view.ticket_id}/${view.number}` },
      el("h3", { text: visible(note) }),
      facts,
      messages
        ? some(messages, MAX_MESSAGES, messageOf, "messages", "messages")
        : el("p", { class: "empty", text: "Its conversation was not kept." }),
      Array.isArray(view.tokens) && view.tokens.length ? tokensOf(view) : null,
      extra.length
        ? fold(
            "notes of the reward functions",
            "rest",
            true,
            ...extra.map(([name, text]) =>
              el("div", { class: "argument" }, el("b", { text: visible(name) }), longText(text)),
            ),
          )
        : null,
    );
  }

  slipstream.conversation = { episode, figuresOf };
})();
