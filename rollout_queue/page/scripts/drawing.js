/* Drawing in SVG: shapes and texts that keep their nodes from one drawing to the next. */
(() => {
  "use strict";
  const { svg, set, visible } = slipstream;

  /** Draws with nodes that it keeps, so that a change moves no running animation. */
  class Drawing {
    constructor(root) {
      this.root = root;
      this.kept = new Map();
      this.used = new Set();
    }

    /** Puts one shape or text; `key` names it over time. */
    put(key, tag, attributes, text) {
      this.used.add(key);
      let node = this.kept.get(key);
      if (!node) {
        node = svg(tag);
        this.kept.set(key, node);
        this.root.append(node);
      }
      set(node, attributes);
      if (text !== undefined) {
        text = visible(text);
        if (node.textContent !== text) node.textContent = text;
      }
      return node;
    }

    /** Puts a text of at most `width` units; in place of a longer one `shorter`, or what fits, and the whole on hover. */
    text(key, x, y, text, className, width = 190, anchor = "start", shorter = text) {
      const whole = fit(text, className, width);
      const cut = whole === text ? text : fit(shorter, className, width);
      const node = this.put(key, "text", { x, y, class: className, "text-anchor": anchor }, cut);
      if (cut !== text) node.append(svg("title", { text: visible(text) }));
    }

    /** Puts a text in two lines, 16 units apart, broken between words. */
    twoLines(key, x, y, text, className, width) {
      const words = text.split(" ");
      let taken = words.length;
      while (taken > 1 && fit(words.slice(0, taken).join(" "), className, width).endsWith("…")) taken -= 1;
      this.text(`${key}a`, x, y, words.slice(0, taken).join(" "), className, width);
      this.text(`${key}b`, x, y + 16, words.slice(taken).join(" "), className, width);
    }

    /** Takes away what was not put since the last call. */
    finish() {
      for (const [key, node] of this.kept) {
        if (this.used.has(key)) continue;
        node.remove();
        this.kept.delete(key);
      }
      this.used.clear();
    }
  }

  const ruled = document.createElement("canvas").getContext("2d");
  const FONTS = { small: "11.5px", big: "600 19px", name: "600 14px", rate: "600 13px" };

  /** Returns as much of a text as `width` units hold, with an ellipsis where it is cut. */
  function fit(text, className, width) {
    const kind = Object.keys(FONTS).find((name) => className.includes(name));
    ruled.font = `${FONTS[kind] || "13px"} ${getComputedStyle(document.body).fontFamily}`;
    text = text.slice(0, 300);
    if (ruled.measureText(text).width <= width) return text;
    let length = text.length;
    while (length > 1 && ruled.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
    return `${text.slice(0, length)}…`;
  }

  slipstream.Drawing = Drawing;
})();
