/* What every part of the page uses: elements that only ever hold text, numbers and times for people, the view's state
 * in the location's hash, and the theme. All parts hang on `window.slipstream`. */
(() => {
  "use strict";
  const slipstream = (window.slipstream = window.slipstream || {});

  const SVG = "http://www.w3.org/2000/svg";
  const MAX_CUT = 2000; // characters of a long text before "show all"
  const MAX_SHOWN = 200000; // characters that one click adds

  /** Sets attributes of a node. `class`, `text`, `on` (event listeners) and `style` (properties) are special. */
  function set(node, attributes) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "text") {
        if (node.textContent !== String(value)) node.textContent = value;
      } else if (name === "on") {
        for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
      } else if (name === "style") {
        for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
      } else if (value === null || value === undefined || value === false) {
        node.removeAttribute(name);
      } else {
        const text = value === true ? "" : String(value);
        if (node.getAttribute(name) !== text) node.setAttribute(name, text);
      }
    }
    return node;
  }

  /** Makes an HTML element. Children are nodes or texts; null ones are left out. */
  function el(tag, attributes, ...children) {
    const node = set(document.createElement(tag), attributes);
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }

  /** Makes an SVG element, as `el` does. */
  function svg(tag, attributes, ...children) {
    const node = set(document.createElementNS(SVG, tag), attributes);
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }

  /** Makes a button with a text and a click listener. */
  function button(text, click, attributes) {
    return el("button", { type: "button", text, on: { click }, ...attributes });
  }

  /** Makes a select with `options` ([value, text], ...), and `value` chosen. */
  function select(label, options, value, change) {
    const node = el("select", { "aria-label": label, on: { change: () => change(node.value) } });
    for (const [each, text] of options) node.append(el("option", { value: each, text, selected: each === value }));
    node.value = value;
    return node;
  }

  // Controls that a reader would not see, or that would turn the text around them: C0, C1, zero width, bidirectional.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

  /** Returns the text with control characters as visible symbols. Tabs and line ends stay. */
  function visible(text) {
    return String(text).replace(HIDDEN, (character) => {
      const code = character.charCodeAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      if (code === 0x7f) return "\u2421";
      return `\u2039U+${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
    });
  }

  /** Makes an element with a text that may be long: it is cut, with a button that shows more. */
  function longText(text, tag = "div", className = "long") {
    text = String(text);
    const body = el("span", { text: visible(text.slice(0, MAX_CUT)) });
    const box = el(tag, { class: className }, body);
    let shown = Math.min(MAX_CUT, text.length);
    if (text.length <= shown) return box;
    const more = button(
      "",
      () => {
        const end = Math.min(text.length, Math.max(shown, 0) + MAX_SHOWN);
        body.append(visible(text.slice(shown, end)));
        shown = end;
        label();
      },
      { class: "more" },
    );
    const label = () => {
      const left = text.length - shown;
      if (left <= 0) more.remove();
      else if (left <= MAX_SHOWN) more.textContent = `show all (${count(left)} more characters)`;
      else more.textContent = `show ${count(MAX_SHOWN)} of ${count(left)} more characters`;
    };
    label();
    box.append(more);
    return box;
  }

  /** Returns a whole number with separators; a dash for none. */
  function count(value) {
    return isNumber(value) ? Math.round(value).toLocaleString("en-US") : "–";
  }

  /** Returns a number in at most `digits` significant digits, as people write it; a dash for none. */
  function number(value, digits = 3) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e9) return `${trim(value / 1e9, digits)} G`;
    if (size >= 1e6) return `${trim(value / 1e6, digits)} M`;
    if (size >= 1e4) return `${trim(value / 1e3, digits)} k`;
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
    return trim(value, digits);
  }

  function trim(value, digits) {
    return String(Number(value.toPrecision(digits)));
  }

  function isNumber(value) {
    return typeof value === "number" && Number.isFinite(value);
  }

  /** Returns a share (0 to 1) in per cent. */
  function percent(value) {
    if (!isNumber(value)) return "–";
    const shown = 100 * value;
    return `${shown !== 0 && Math.abs(shown) < 10 ? trim(shown, 2) : Math.round(shown)} %`;
  }

  /** Returns bytes with a unit. */
  function bytes(value) {
    if (!isNumber(value)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
    return `${unit === 0 ? Math.round(value) : trim(value, 3)} ${units[unit]}`;
  }

  /** Returns a duration in seconds as people say it: 0.35 s, 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
  function seconds(value) {
    if (!isNumber(value)) return "–";
    if (value < 0) value = 0;
    if (value < 10) return `${trim(value, 2)} s`;
    const whole = Math.round(value);
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
    const minutes = Math.round(whole / 60);
    if (minutes < 1440) return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
    const hours = Math.round(minutes / 60);
    return `${Math.floor(hours / 24)} d${hours % 24 ? ` ${hours % 24} h` : ""}`;
  }

  /** Returns wall time (seconds) as a clock's, with the date where it is not today's. */
  function clock(at, withDate = false) {
    if (!isNumber(at)) return "–";
    const date = new Date(at * 1000);
    const time = date.toLocaleTimeString("en-GB");
    const day = date.toLocaleDateString("en-CA");
    return withDate && day !== new Date().toLocaleDateString("en-CA") ? `${day} ${time}` : time;
  }

  /** Returns "1 server", "2 servers". */
  function plural(amount, noun) {
    return `${count(amount)} ${noun}${amount === 1 ? "" : "s"}`;
  }

  /** Returns the last known value of a column. */
  function last(values) {
    for (let i = (values || []).length - 1; i >= 0; i--) if (isNumber(values[i])) return values[i];
    return null;
  }

  // The view's state: short names and texts, in the hash, so that a link leads to the same view.
  const listeners = new Set();
  let values = read();

  function read() {
    return new Map(new URLSearchParams(location.hash.slice(1)));
  }

  const state = {
    /** Returns a value of the view's state, or `fallback`. */
    get(name, fallback = "") {
      return values.has(name) ? values.get(name) : fallback;
    },
    /** Changes values; null or "" takes one away. `keep`: make an entry in the browser's history. */
    set(changes, keep = false) {
      let changed = false;
      for (const [name, value] of Object.entries(changes)) {
        const text = value === null || value === undefined ? "" : String(value);
        if (text === (values.get(name) || "")) continue;
        changed = true;
        if (text === "") values.delete(name);
        else values.set(name, text);
      }
      if (!changed) return;
      history[keep ? "pushState" : "replaceState"](null, "", `#${new URLSearchParams([...values])}`);
      for (const listener of listeners) listener(Object.keys(changes));
    },
    /** Calls `listener(names)` after each change, by the page or by the browser's back button. */
    listen(listener) {
      listeners.add(listener);
    },
  };

  function reread() {
    const before = values;
    values = read();
    const names = [...new Set([...before.keys(), ...values.keys()])].filter(
      (name) => before.get(name) !== values.get(name),
    );
    if (names.length) for (const listener of listeners) listener(names);
  }
  window.addEventListener("hashchange", reread);
  window.addEventListener("popstate", reread);

  // The theme: the system's, until a person chooses.
  const KEY = "slipstream-theme";
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const themed = new Set();

  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a file in a browser that forbids storage
    }
  }

  const theme = {
    chosen: stored(),
    /** Tells whether the page is dark. */
    dark() {
      return this.chosen ? this.chosen === "dark" : system.matches;
    },
    /** Switches between dark and light, and remembers it. */
    toggle() {
      this.chosen = this.dark() ? "light" : "dark";
      try {
        localStorage.setItem(KEY, this.chosen);
      } catch {
        // Remembered until the page is closed.
      }
      this.apply();
    },
    /** Puts the theme on the document, and tells those who draw with colours of their own. */
    apply() {
      document.documentElement.dataset.theme = this.dark() ? "dark" : "light";
      for (const listener of themed) listener();
    },
    listen(listener) {
      themed.add(listener);
    },
  };
  system.addEventListener("change", () => theme.apply());
  theme.apply();

  /** Returns a colour of the style sheet, such as "--accent". */
  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  Object.assign(slipstream, {
    el,
    svg,
    set,
    button,
    select,
    visible,
    longText,
    isNumber,
    state,
    theme,
    colour,
    last,
    format: { count, number, percent, bytes, seconds, clock, plural },
  });
})();
