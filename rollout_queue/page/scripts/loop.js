/* The loop as a picture: servers, workers, queue and learner, rates on the arrows between them, who waits for whom at
 * the one that waits, and a ruler of policy versions. */
(() => {
  "use strict";
  const { svg, set, format, visible, isNumber, Drawing } = slipstream;
  const { count, number, percent, seconds, plural } = format;

  const { figuresOf } = slipstream.source;

  const NAMES = { servers: "vLLM servers", workers: "Rollout workers", queue: "Queue", learner: "Learner" };
  const ROLES = {
    servers: "sample the policy's answers",
    workers: "play and judge episodes",
    queue: "hands out prompts, keeps groups",
    learner: "trains, and makes new weights",
  };
  const PLACES = [
    ["episodes_generating", "generating", "--series-1"],
    ["episodes_in_tools", "tools", "--series-2"],
    ["episodes_in_judgement", "judged", "--series-5"],
    ["episodes_waiting", "waiting", "--series-10"],
  ];
  const MAX_SQUARES = 48;
  const WIDE = 700; // pixels from which the nodes stand side by side

  /** Returns where everything stands, in the units of the drawing. */
  function layoutFor(wide) {
    const nodes = {};
    const [width, height] = wide ? [222, 216] : [280, 206];
    Object.keys(NAMES).forEach((name, i) => {
      nodes[name] = wide ? { x: 4 + 288.6 * i, y: 6 } : { x: 64, y: 8 + 268 * i };
      Object.assign(nodes[name], { w: width, h: height });
    });
    return wide
      ? { wide, w: 1096, h: 340, nodes, ruler: { x: 390, y: 312, w: 330 } }
      : { wide, w: 360, h: 1100, nodes, ruler: { x: 84, y: 1074, w: 220 } };
  }

  /** Tells at which node someone stands who waits. */
  function nodeOf(who) {
    if (who.startsWith("learner")) return "learner";
    if (who.startsWith("server ")) return "servers";
    if (who === "the queue" || who.startsWith("groups ") || who.startsWith("evaluation ")) return "queue";
    return "workers";
  }

  /** Returns what each node says: a big figure, its parts for a bar, two lines. */
  function contents(page, status, at) {
    const { groups, servers, rates } = status;
    const { reward, stepTime, learnerWaits, workers: here } = figuresOf(page, status, at);
    const serving = servers.filter((server) => server.state === "serving").length;
    const proven = servers.map((server) => server.version).filter(isNumber);
    const [oldest, newest] = [Math.min(...proven), Math.max(...proven)];
    const versions = oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
    const open = here.reduce((sum, worker) => sum + worker.episodes_in_flight, 0);
    const places = PLACES.map(([key, name, colour]) => [
      name,
      here.reduce((sum, worker) => sum + (worker[key] || 0), 0),
      colour,
    ]);
    const over = open - places.reduce((sum, place) => sum + place[1], 0);
    if (over > 0) places.push(["ended", over, "--series-3"]);
    const gone = status.workers.filter((worker) => ["silent", "refused"].includes(worker.does)).length;
    const failed = here.reduce((sum, worker) => sum + worker.episodes_failed, 0);
    const failures = failed ? `; ${plural(failed, "failure")}` : "";
    return {
      servers: {
        big: servers.length ? `${count(serving)} of ${count(servers.length)} serving` : "none is registered",
        squares: servers.slice(0, MAX_SQUARES).map((server) => [server.name, server.state]),
        lines: [
          proven.length ? `${versions}; learner at ${status.version}` : "no version proven yet",
          `${count(rates.tokens_sampled)} tokens sampled a second`,
        ],
      },
      workers: {
        big: here.length ? `${plural(open, "episode")}` : "none is here",
        parts: places,
        total: Math.max(open, 1),
        lines: [
          places
            .filter((place) => place[1])
            .map((place) => `${count(place[1])} ${place[0]}`)
            .join(", ") || "no episode is open",
          `${plural(here.length, "worker")}${gone ? `, ${count(gone)} gone` : ""}, idle ${percent(status.worker_wait_share)}${failures}`,
        ],
      },
      queue: {
        big: `${count(groups.outstanding)} of ${count(groups.limit)} groups`,
        parts: [
          ["at workers", groups.tickets, "--series-1"],
          ["ready", groups.ready, "--series-3"],
          ["with the learner", groups.leased, "--series-5"],
        ],
        total: Math.max(groups.limit, groups.outstanding, 1),
        lines: [
          `${count(groups.tickets)} at workers, ${count(groups.ready)} ready, ${count(groups.leased)} taken`,
          `work for ${number(status.depth)} steps, aims at ${number(status.depth_target)}`,
        ],
      },
      learner: {
        big: `step ${count(status.step)} of ${count(status.total_steps)}`,
        shorter: `step ${count(status.step)}`,
        parts: [["done", status.step, "--series-3"]],
        total: Math.max(status.total_steps, 1),
        lines: [
          reward === null ? "no step yet" : `reward ${number(reward)}, ${seconds(stepTime)} a step`,
          `waits ${percent(learnerWaits)} of its time for groups`,
        ],
      },
    };
  }

  /** Returns the same of a run that is planned: the figures and shares of time that the plan names. */
  function planned(parts, plan) {
    for (const [name, node] of Object.entries(plan.nodes)) {
      Object.assign(parts[name], { big: node.big, lines: node.lines, total: 100 });
      parts[name].parts = node.shares.map(([part, share], i) => [part, 100 * share, `--series-${i ? 10 : 1}`]);
    }
    return parts;
  }

  /** Draws one node. `plan`: whether it is of a run that is planned, where waits have no beginning. */
  function drawNode(drawing, name, box, content, waits, alarm, plan) {
    const { x, y, w, h } = box;
    const key = (part) => `${name}.${part}`;
    const mood = alarm ? "alarm" : waits.length ? "waits" : "";
    drawing.put(key("box"), "rect", { x, y, width: w, height: h, rx: 10, class: `node ${mood}` });
    drawing.text(key("name"), x + 14, y + 24, NAMES[name], "name", w - 24);
    drawing.text(key("role"), x + 14, y + 40, ROLES[name], "small dim", w - 20);
    drawing.text(key("big"), x + 14, y + 68, content.big, "big", w - 20, "start", content.shorter);
    const inner = w - 28;
    if (content.squares) {
      const size = Math.min(14, inner / Math.max(1, Math.ceil(content.squares.length / 2)) - 2);
      content.squares.forEach(([server, state], i) => {
        const perRow = Math.floor(inner / (size + 2));
        const node = drawing.put(key(`square${i}`), "rect", {
          x: x + 14 + (i % perRow) * (size + 2),
          y: y + 78 + Math.floor(i / perRow) * (size + 2),
          width: size,
          height: size,
          rx: 3,
          class: `state-${state}`,
        });
        node.replaceChildren(svg("title", { text: visible(`${server}: ${state}`) }));
      });
    } else {
      drawing.put(key("track"), "rect", { x: x + 14, y: y + 80, width: inner, height: 10, rx: 3, class: "track" });
      let from = x + 14;
      content.parts.forEach(([part, amount, colour], i) => {
        const width = Math.max(0, Math.min(x + 14 + inner - from, (inner * amount) / content.total));
        const node = drawing.put(key(`part${i}`), "rect", {
          x: from,
          y: y + 80,
          width,
          height: 10,
          style: { fill: `var(${colour})` },
        });
        node.replaceChildren(svg("title", { text: `${part}: ${count(amount)}` }));
        from += width;
      });
    }
    content.lines.forEach((line, i) => drawing.text(key(`line${i}`), x + 14, y + 112 + 17 * i, line, "small", inner));
    const waitBox = { x: x + 6, y: y + h - 66, width: w - 12, height: 60, rx: 6 };
    drawing.put(key("waitbox"), "rect", { ...waitBox, class: waits.length ? "waitbox" : "none" });
    if (waits.length === 0) {
      drawing.text(key("wait0"), x + 14, y + h - 16, "waits for nobody", "small dim", inner);
      return;
    }
    if (plan) {
      drawing.twoLines(key("wait0"), x + 14, y + h - 41, `${waits[0].who} ${waits[0].what}`, "small wait", inner);
      return;
    }
    const longest = waits.reduce((a, b) => (a.since_s >= b.since_s ? a : b));
    const others = waits.length > 1 ? ` (+${waits.length - 1})` : "";
    drawing.text(
      key("wait0"),
      x + 14,
      y + h - 49,
      `${longest.who}: waiting ${seconds(longest.since_s)}${others}`,
      "small wait",
      inner,
    );
    drawing.twoLines(key("wait1"), x + 14, y + h - 32, `for ${longest.what}`, "small wait", inner);
  }

  /** Draws an arrow with its two words. `speed`: 0 stands still, up to 3. */
  function drawArrow(drawing, key, path, words, at, speed, anchor = "middle") {
    drawing.put(`${key}.line`, "path", { d: path, class: "arrow", "marker-end": "url(#arrowhead)" });
    drawing.put(`${key}.flow`, "path", { d: path, class: `flow flow-${speed}` });
    words.forEach((word, i) =>
      drawing.text(`${key}.word${i}`, at.x, at.y + 14 * i, word, i ? "small dim" : "rate", 92, anchor),
    );
  }

  /** Returns how fast an arrow's dashes move: by the rate, in four speeds. */
  function speedOf(rate, fast) {
    if (!isNumber(rate) || rate <= 0) return 0;
    return rate >= fast ? 3 : rate >= fast / 10 ? 2 : 1;
  }

  function drawArrows(drawing, layout, status, publishing, plan) {
    const { nodes, wide } = layout;
    const { rates, groups } = status;
    const generating = status.workers.reduce((sum, worker) => sum + (worker.episodes_generating || 0), 0);
    const pairs = [
      [
        "servers",
        "workers",
        [count(rates.tokens_sampled), "tokens/s"],
        speedOf(rates.tokens_sampled, 1000),
        plan ? ["requests", ""] : [count(generating), "requests"],
        plan ? speedOf(rates.tokens_sampled, 1000) : speedOf(generating, 100),
      ],
      [
        "workers",
        "queue",
        [number(rates.groups, 2), "groups/s"],
        speedOf(rates.groups, 10),
        plan ? [number(rates.groups, 2), "prompts/s"] : [count(groups.tickets), "in work"],
        plan ? speedOf(rates.groups, 10) : speedOf(groups.tickets, 100),
      ],
      [
        "queue",
        "learner",
        [count(rates.tokens_trained), "tokens/s"],
        speedOf(rates.tokens_trained, 1000),
        [number(rates.steps, 2), "steps/s"],
        speedOf(rates.steps, 1),
      ],
    ];
    for (const [from, to, there, speedThere, back, speedBack] of pairs) {
      const [a, b] = [nodes[from], nodes[to]];
      if (wide) {
        const [left, right] = [a.x + a.w + 6, b.x - 6];
        const middle = { x: (left + right) / 2 };
        drawArrow(drawing, `${from}>${to}`, `M${left} 92H${right - 4}`, there, { ...middle, y: 68 }, speedThere);
        drawArrow(drawing, `${to}>${from}`, `M${right} 112H${left + 4}`, back, { ...middle, y: 130 }, speedBack);
      } else {
        const [top, bottom] = [a.y + a.h + 5, b.y - 5];
        const middle = (top + bottom) / 2;
        drawArrow(
          drawing,
          `${from}>${to}`,
          `M180 ${top}V${bottom - 4}`,
          there,
          { x: 168, y: middle },
          speedThere,
          "end",
        );
        drawArrow(
          drawing,
          `${to}>${from}`,
          `M204 ${bottom}V${top + 4}`,
          back,
          { x: 216, y: middle },
          speedBack,
          "start",
        );
      }
    }
    const [from, to] = [nodes.learner, nodes.servers];
    const middle = (box) => box.x + box.w / 2;
    const path = wide
      ? `M${middle(from)} ${from.y + from.h + 5}v34q0 12 -12 12H${middle(to) + 12}q-12 0 -12 -12V${to.y + to.h + 9}`
      : `M${from.x - 5} ${from.y + 89}H44q-14 0 -14 -14V${to.y + 103}q0 -14 14 -14H${to.x - 9}`;
    drawArrow(drawing, "weights", path, [], { x: 0, y: 0 }, publishing ? 3 : speedOf(rates.steps, 1));
    const label = plan ? plan.weights : `new weights: version ${count(status.version)}`;
    if (wide) {
      drawing.put("weights.label", "rect", { x: 435, y: 257, width: 240, height: 26, rx: 13, class: "pill" });
      drawing.text("weights.text", 555, 274, label, "rate", 230, "middle");
    } else {
      drawing.put(
        "weights.text",
        "text",
        { transform: "translate(20 530) rotate(-90)", class: "rate", "text-anchor": "middle" },
        label,
      );
    }
  }

  /** Draws the versions that may still train, where the servers are, and how old the trained tokens were. */
  function drawRuler(drawing, ruler, page, status, now) {
    const { staleness: mean, stalenessMax, stalenessOf } = figuresOf(page, status, now);
    const bound = page.max_staleness ?? status.max_staleness;
    const { x, y, w } = ruler;
    const place = (version) => x + w - (w * Math.min(bound + 0.6, status.version - version)) / Math.max(bound, 1);
    drawing.put("ruler.line", "path", { d: `M${x - 10} ${y}H${x + w}`, class: "axis" });
    const every = Math.max(1, Math.ceil(bound / 8));
    for (let age = 0; age <= bound; age += every) {
      const version = status.version - age;
      if (version < 0) break;
      drawing.put(`ruler.tick${age}`, "path", { d: `M${place(version)} ${y - 4}v8`, class: "axis" });
      drawing.text(
        `ruler.version${age}`,
        place(version),
        y + 18,
        age ? String(version) : `version ${version}`,
        "small dim",
        100,
        "middle",
      );
    }
    const heights = new Map();
    status.servers.slice(0, MAX_SQUARES).forEach((server, i) => {
      if (!isNumber(server.version)) return;
      const at = place(server.version);
      const height = heights.get(at) || 0;
      heights.set(at, height + 1);
      const mark = drawing.put(`ruler.server${i}`, "circle", {
        cx: at,
        cy: y - 10 - 8 * Math.min(height, 3),
        r: 3.6,
        class: `state-${server.state}`,
      });
      mark.replaceChildren(svg("title", { text: visible(`${server.name} has version ${server.version}`) }));
    });
    const at = place(status.version - mean);
    drawing.put("ruler.mean", "path", { d: `M${at} ${y + 1}l5 7h-10z`, class: "mean" });
    const ages = `${number(mean, 2)} versions old on average, ${stalenessMax} at most`;
    const dots = heights.size ? "the dots are servers; " : "";
    const text = `Versions: ${dots}the trained tokens (▲) ${stalenessOf} are ${ages}; the bound is ${bound}`;
    drawing.put("ruler.text", "title", {}, text);
    return text;
  }

  /** Keeps the picture in `container`. */
  class Loop {
    constructor(container) {
      this.root = svg("svg", { class: "loop", role: "img" });
      container.append(this.root);
      this.wide = null;
    }

    /** Draws a state of the run. Returns the sentence under the picture about staleness. */
    draw(page, status, at = null) {
      const wide = (this.root.parentNode.clientWidth || 1000) >= WIDE;
      if (wide !== this.wide) {
        this.wide = wide;
        this.root.replaceChildren(
          svg(
            "defs",
            {},
            svg(
              "marker",
              {
                id: "arrowhead",
                viewBox: "0 0 8 8",
                refX: 6,
                refY: 4,
                markerWidth: 5,
                markerHeight: 5,
                orient: "auto-start-reverse",
              },
              svg("path", { d: "M0 0L8 4L0 8z", class: "arrowhead" }),
            ),
          ),
        );
        this.drawing = new Drawing(this.root);
      }
      const layout = layoutFor(wide);
      set(this.root, { viewBox: `0 0 ${layout.w} ${layout.h}` });
      if (!status) {
        this.drawing.finish();
        return "";
      }
      const parts = page.plan ? planned(contents(page, status, at), page.plan) : contents(page, status, at);
      const waits = Object.fromEntries(Object.keys(NAMES).map((name) => [name, []]));
      for (const wait of status.waits) waits[nodeOf(wait.who)].push(wait);
      const publishing = status.servers.some((server) => server.state === "syncing");
      drawArrows(this.drawing, layout, status, publishing, page.plan);
      const alarm = status.stall.stalled || status.gave_up !== null;
      for (const [name, box] of Object.entries(layout.nodes)) {
        drawNode(this.drawing, name, box, parts[name], waits[name], alarm && name === "learner", Boolean(page.plan));
      }
      const text = drawRuler(this.drawing, layout.ruler, page, status, at);
      this.drawing.finish();
      const said = Object.keys(NAMES).map(
        (name) => `${NAMES[name]}: ${parts[name].big}; ${parts[name].lines.join("; ")}`,
      );
      set(this.root, { "aria-label": visible(`The training loop. ${said.join(". ")}.`) });
      return text;
    }
  }

  slipstream.loop = { Loop };
})();
