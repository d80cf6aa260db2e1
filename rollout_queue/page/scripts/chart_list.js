/* Which charts there are, and which columns each draws: the metrics of docs/metrics.md by their names and prefixes. A
 * metric that no chart names gets one of its own under "Everything else", so that a task's own metrics are seen too. */
(() => {
  "use strict";
  const { isNumber } = slipstream;

  const SECTIONS = ["Learning", "Flow", "Policy", "Episodes", "Weights", "Everything else"];

  /** A line of a chart by optimiser step. */
  const step = (key, name, options) => ({ from: "steps", key, name: name || key, ...options });
  /** A line of a chart by wall time. */
  const time = (key, name, options) => ({ from: "time", key, name: name || key, ...options });
  /** All metrics of steps whose names match; `$1` of `name` is the first group. `several`: only if two match. */
  const every = (pattern, name = "$1", options = {}) => ({ from: "steps", pattern, name, ...options });

  // Metrics that are positions or sums of other things, and say nothing as a line.
  const SILENT = new Set([
    "step",
    "at",
    "version",
    "epoch",
    "num_tokens",
    "rollouts",
    "rows",
    "eval/step",
    "eval/version_min",
    "eval/version_max",
    "eval/rows",
  ]);

  const CHARTS = [
    {
      id: "reward",
      help: "Mean reward of the episodes of each optimiser step, and of each reward function",
      section: "Learning",
      title: "Reward",
      lines: [
        step("reward", "reward", { width: 2.2 }),
        every(/^rewards\/(.+)\/mean$/, "$1", { several: true }),
        step("eval/reward", "evaluation", { markers: true }),
      ],
    },
    {
      id: "evaluation",
      help: "Rewards on the task's evaluation data, which is not trained",
      section: "Learning",
      title: "Evaluation",
      lines: [
        step("eval/reward", "reward", { markers: true }),
        every(/^eval\/((?:pass|best)@.+)$/, "$1", { markers: true }),
        every(/^eval\/rewards\/(.+)\/mean$/, "$1", { markers: true, several: true }),
      ],
    },
    {
      id: "reward_spread",
      help: "How far rewards lie apart. Episodes of one prompt whose rewards are all equal teach nothing: their share is drawn too",
      section: "Learning",
      title: "Spread of rewards",
      lines: [
        step("reward_std", "standard deviation"),
        step("frac_reward_zero_std", "share without spread"),
        every(/^rewards\/(.+)\/std$/, "$1", { several: true }),
      ],
    },
    {
      id: "depth",
      help: "Groups that are being made, or wait to be trained, counted in optimiser steps; what the queue aims at, and how many it allows",
      section: "Flow",
      title: "Depth: groups outstanding",
      unit: "steps",
      lines: [
        time("depth", "depth", { width: 2.2 }),
        time("depth_target", "target"),
        time("limit", "limit", { perStep: true }),
      ],
    },
    {
      id: "staleness",
      help: "How many optimiser steps older the weights that sampled a token were than those that trained on it. In flight: passed while its episode was played; in the queue: while its group waited; both of a group's oldest token, even where it is masked. Dashed: queue.max_staleness",
      section: "Flow",
      title: "Staleness of trained tokens",
      unit: "versions",
      bound: true,
      lines: [
        step("staleness_mean", "mean", { width: 2.2 }),
        step("staleness_max", "highest"),
        step("staleness_in_flight", "in flight"),
        step("staleness_in_queue", "in the queue"),
        time("staleness_mean", "mean", { width: 2.2, without: ["steps", "staleness_mean"] }),
        time("staleness_max", "highest", { without: ["steps", "staleness_mean"] }),
        time("staleness_in_flight", "in flight", { without: ["steps", "staleness_mean"] }),
        time("staleness_in_queue", "in the queue", { without: ["steps", "staleness_mean"] }),
      ],
    },
    {
      id: "step_time",
      help: "Where the seconds of an optimiser step go",
      section: "Flow",
      title: "Time of a step by phase",
      unit: "s",
      stacked: true,
      lines: [
        step("wait_s", "waits for groups"),
        step("train_s", "trains"),
        step("publish_blocked_ms", "hands weights over", { scale: 0.001 }),
        {
          from: "steps",
          name: "everything else",
          key: "step_time",
          minus: [
            ["wait_s", 1],
            ["train_s", 1],
            ["publish_blocked_ms", 0.001],
          ],
        },
      ],
    },
    {
      id: "tokens",
      help: "Over the last minute: tokens that the servers sampled, and tokens that the learner trained",
      section: "Flow",
      title: "Tokens a second",
      unit: "tokens/s",
      lines: [
        time("rate_tokens_sampled", "sampled"),
        time("rate_tokens_trained", "trained"),
        step("train_tokens_per_s", "trained in the step", { without: ["time", "rate_tokens_trained"] }),
      ],
    },
    {
      id: "waits",
      help: "Share of the newest steps in which the learner had too few groups, and of the workers' time in which the queue gave them no prompts",
      section: "Flow",
      title: "Who waits",
      unit: "share of time",
      lines: [time("learner_wait_share", "learner, for groups"), time("worker_wait_share", "workers, for tickets")],
    },
    {
      id: "groups",
      help: "A group is all episodes of one prompt: at workers while it is played, ready while it waits in the queue, with the learner until it is trained",
      section: "Flow",
      title: "Groups by place",
      unit: "groups",
      stacked: true,
      lines: [time("tickets", "at workers"), time("ready", "ready"), time("leased", "with the learner")],
    },
    {
      id: "drops",
      help: "Groups that were not trained. Zero variance: all their rewards are equal; overage: too stale; failed: a worker gave up",
      section: "Flow",
      title: "Dropped groups by reason, in all",
      unit: "groups",
      lines: [
        { from: "time", pattern: /^drop\/(.+)$/, name: "$1" },
        time("rejections_total", "refused at the door", { nonzero: true }),
      ],
    },
    {
      id: "lost_tokens",
      help: "Tokens of the groups that arrived for a step, and of those that trained",
      section: "Flow",
      title: "Tokens of a step: sampled and trained",
      unit: "tokens",
      lines: [step("tokens_sampled", "sampled"), step("tokens_trained", "trained")],
    },
    {
      id: "trained_age",
      help: "Tokens by how many versions behind their weights were",
      section: "Flow",
      title: "Trained tokens by staleness",
      unit: "tokens",
      stacked: true,
      lines: [every(/^staleness\/tokens_(\d+)$/, "$1 old")],
    },
    {
      id: "activity",
      help: "What most of each worker's open episodes do",
      section: "Flow",
      title: "Workers by what they do",
      unit: "workers",
      stacked: true,
      lines: [{ from: "time", pattern: /^workers_(.+)$/, name: "$1" }],
    },
    {
      id: "episodes_open",
      section: "Flow",
      title: "Open episodes",
      unit: "episodes",
      lines: [time("episodes_open", "open")],
    },
    {
      id: "bytes",
      section: "Flow",
      title: "Bytes of the groups in the queue",
      unit: "B",
      lines: [time("bytes", "bytes")],
    },
    {
      id: "rates",
      section: "Flow",
      title: "Groups a second",
      unit: "groups/s",
      lines: [time("rate_groups", "groups")],
    },
    {
      id: "entropy",
      help: "How undecided the policy is at a token; a fall to 0 means that it always says the same",
      section: "Policy",
      title: "Entropy",
      unit: "nats",
      lines: [step("entropy")],
    },
    {
      id: "kl",
      help: "How far the policy has moved from the one that sampled, and from the reference model",
      section: "Policy",
      title: "KL divergence",
      unit: "nats",
      lines: [
        step("kl", "to the sampling policy"),
        step("kl_reference", "to the reference"),
        step("teacher/kl", "to the teacher"),
        every(/^sampler\/kl_staleness_(\d+)$/, "at staleness $1"),
      ],
    },
    {
      id: "clip",
      help: "Share of tokens whose gradient was cut because the policy had moved too far from the sampler",
      section: "Policy",
      title: "Clipped tokens",
      unit: "share",
      lines: [
        every(/^clip_ratio\/(.+?)(?:_mean)?$/, "$1"),
        step("cispo_clip_ratio", "cispo"),
        every(/^correction\/(truncated|masked)$/, "correction: $1"),
        every(/^masked\/(.+)$/, "masked: $1"),
      ],
    },
    {
      id: "ratio",
      help: "Probability of a token under the policy that trains, divided by that under the one that sampled it; 1: the same",
      section: "Policy",
      title: "Probability ratio, policy to sampler",
      lines: [
        step("sampler/ratio_p99", "99th percentile"),
        step("sampler/ratio_p50", "median"),
        step("sampler/ratio_p1", "1st percentile"),
        step("ratio", "mean of the objective's"),
        every(/^sampling\/importance_sampling_ratio\/(.+)$/, "weight: $1"),
      ],
    },
    {
      id: "ess",
      help: "Effective sample size: how much of a step's data counts after it was weighted for its age",
      section: "Policy",
      title: "Effective sample size",
      unit: "share",
      lines: [step("ess"), step("correction/ess", "of the correction")],
    },
    {
      id: "loss",
      help: "The objective that the optimiser lowers; it need not fall while the reward rises",
      section: "Policy",
      title: "Loss",
      lines: [step("loss")],
    },
    {
      id: "grad_norm",
      help: "Length of the gradient; 0 means that nothing was learnt",
      section: "Policy",
      title: "Norm of the gradient",
      lines: [step("grad_norm")],
    },
    { id: "learning_rate", section: "Policy", title: "Learning rate", lines: [step("learning_rate")] },
    {
      id: "lengths",
      section: "Episodes",
      title: "Sampled tokens of an episode",
      unit: "tokens",
      lines: [
        step("completions/mean_length", "mean", { width: 2.2 }),
        step("completions/max_length", "longest"),
        step("completions/min_length", "shortest"),
        step("completions/mean_terminated_length", "mean of those that ended"),
      ],
    },
    {
      id: "turns",
      section: "Episodes",
      title: "Turns of an episode",
      lines: [step("rollout/turns_mean", "mean"), step("rollout/turns_max", "most")],
    },
    {
      id: "tools",
      section: "Episodes",
      title: "Tool calls of an episode",
      lines: [step("tools/call_frequency", "all", { width: 2.2 }), every(/^tools\/([^/]+)\/call_frequency$/)],
    },
    {
      id: "tool_failures",
      section: "Episodes",
      title: "Failed tool calls",
      unit: "share of calls",
      lines: [step("tools/failure_frequency", "all", { width: 2.2 }), every(/^tools\/([^/]+)\/failure_frequency$/)],
    },
    {
      id: "tool_time",
      section: "Episodes",
      title: "Time of a tool call",
      help: "Mean seconds from a call of each tool to its answer; a plain function's with its wait for one of worker.user_threads",
      unit: "s",
      lines: [every(/^tools\/([^/]+)\/call_s$/)],
    },
    {
      id: "finish",
      help: "Stop: by itself; length and context: cut off by a limit of tokens; turn_limit; timeout; aborted",
      section: "Episodes",
      title: "How episodes end",
      unit: "share",
      lines: [every(/^finish\/(.+)$/)],
    },
    {
      id: "environment",
      section: "Episodes",
      title: "Time in the environment",
      unit: "s an episode",
      lines: [every(/^env\/(.+)_s$/)],
    },
    {
      id: "publication",
      help: "Seconds in which new weights travel to the servers, and in which these stand still for the exchange",
      section: "Weights",
      title: "Time of a publication",
      unit: "s",
      lines: [
        step("weight_sync/transfer_s", "transfer, during generation"),
        step("weight_sync/pause_s", "pause of generation"),
      ],
    },
    {
      id: "sent",
      section: "Weights",
      title: "Bytes of a publication",
      unit: "B",
      lines: [step("weight_sync/sent_bytes", "sent"), step("weight_sync/whole_bytes", "whole")],
    },
    {
      id: "probe",
      help: "After each publication a server's log-probs are compared with the learner's: the largest difference",
      section: "Weights",
      title: "Largest difference in a proof",
      unit: "nats",
      lines: [step("weight_sync/probe_max_abs_diff", "difference")],
    },
    {
      id: "servers",
      section: "Weights",
      title: "Servers",
      lines: [time("servers_serving", "serving"), time("servers", "registered")],
    },
    {
      id: "distance",
      help: "Mean distance of the log-probs of each server's samples to the learner's: one that stands out has wrong weights or arithmetic",
      section: "Weights",
      title: "Distance of each server's log-probs to the learner's",
      unit: "nats",
      lines: [every(/^sampler\/distance\/(.+)$/)],
    },
    {
      id: "mfu",
      help: "Share of the device's arithmetic that the learner uses (model FLOPs utilisation), and how full its rows are packed",
      section: "Weights",
      title: "MFU, and packing",
      unit: "share",
      lines: [step("mfu", "MFU"), step("packing_fill", "packing")],
    },
  ];

  /** Returns the lines of a chart that `page` has data for, each with its own column's name. */
  function linesOf(chart, page) {
    const found = [];
    const has = (from, key) => (page[from][key] || []).some(isNumber);
    for (const line of chart.lines) {
      if (line.without && has(...line.without)) continue;
      if (!line.pattern) {
        if (!has(line.from, line.key)) continue;
        if (line.nonzero && !page[line.from][line.key].some((value) => value > 0)) continue;
        found.push(line);
        continue;
      }
      const keys = Object.keys(page[line.from]).filter((key) => line.pattern.test(key) && has(line.from, key));
      if (line.several && keys.length < 2) continue;
      for (const key of keys) {
        const part = line.pattern.exec(key)[1].replaceAll("_", " ");
        found.push({ ...line, key, name: line.name.replace("$1", () => part) });
      }
    }
    return found;
  }

  /** Returns the y values of a line. */
  function valuesOf(line, page) {
    const columns = page[line.from];
    const values = columns[line.key] || [];
    const scale = line.perStep ? 1 / (page.groups_per_step || 1) : line.scale || 1;
    return values.map((value, i) => {
      if (!isNumber(value)) return null;
      let result = value * scale;
      for (const [key, factor] of line.minus || []) result -= factor * ((columns[key] || [])[i] || 0);
      return line.minus ? Math.max(0, result) : result;
    });
  }

  /** Tells whether a chart draws a metric of a step. */
  function drawn(name) {
    return CHARTS.some((chart) =>
      chart.lines.some((line) => {
        if (line.from !== "steps") return false;
        return line.pattern
          ? line.pattern.test(name)
          : line.key === name || (line.minus || []).some(([key]) => key === name);
      }),
    );
  }

  /** Returns the charts that have something to draw, those of unnamed metrics last. */
  function chartsOf(page) {
    const found = [];
    for (const chart of CHARTS) {
      const lines = linesOf(chart, page);
      if (lines.length) found.push({ ...chart, lines });
    }
    for (const name of Object.keys(page.steps).sort()) {
      if (SILENT.has(name) || drawn(name) || !page.steps[name].some(isNumber)) continue;
      found.push({ id: `metric:${name}`, section: SECTIONS.at(-1), title: name, lines: [step(name)] });
    }
    return found;
  }

  slipstream.chartList = { SECTIONS, chartsOf, valuesOf, linesOf };
})();
