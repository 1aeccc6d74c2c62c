// A response's text, with its tokens coloured by a number that each has.

// `limits`: absolute values at which the next shade begins. Signed colourings have shades for both signs.
const COLOURINGS = {
  none: { label: "no colours" },
  surprise: { label: "surprise", limits: [0.105, 0.693, 2.303, 4.605], factor: 0.01, unit: "nats",
    legend: ["p < 90 %", "p < 50 %", "p < 10 %", "p < 1 %"], about: "The probability that the engine gave the token that it sampled." },
  gap: { label: "log-prob gap", limits: [0.01, 0.05, 0.2, 1], factor: 0.001, unit: "nats", signed: true,
    legend: ["0.01", "0.05", "0.2", "1 nat"], about: "Log-prob by the trainer minus that by the engine: 0 where both compute the same." },
  advantage: { label: "advantage", limits: [0.01, 0.25, 0.5, 0.75], signed: true,
    legend: ["> 0", "25 %", "50 %", "75 % of the largest"], about: "The advantage of the token, against the largest of the step." },
  weight: { label: "loss weight", limits: [0.01, 0.25, 0.5, 0.75], signed: true, negated: true,
    legend: ["> 0", "25 %", "50 %", "75 % of the largest"],
    about: "How the first update moves the token's log-prob, against the largest of the step: up or down." },
};

// The numbers of a response's tokens in a colouring: a function of the token's place, null where there are none.
function numbers(name, tokens, row) {
  const { factor, negated } = COLOURINGS[name];
  const own = tokens[name]?.[row];
  const sign = negated ? -1 : 1;
  if (name === "advantage" || name === "weight")
    return own && tokens[`largest_${name}`] ? at => (sign * (own.length === 1 ? own[0] : own[at])) / 1000 : null;
  return own ? at => own[at] * factor : null;
}

function shade(value, { limits, signed }) {
  let level = 0;
  while (level < limits.length && Math.abs(value) >= limits[level]) level++;
  if (!level) return "";
  return `${signed ? (value > 0 ? "up" : "down") : "much"}-${level}`;
}

const LONGEST = 1500; // tokens that are shown before the reader asks for the rest

// The text of a response, or of a turn that begins with the response's token `first`, as nodes.
// More than LONGEST tokens are cut, with a button for the rest.
function coloured(text, lengths, value, colouring, query, first = 0) {
  const place = h("div", { class: "text", translate: "no", dir: "auto" });
  if (!lengths || (!value && !query)) {
    place.append(...marked(text, query));
    return place;
  }
  let at = 0;
  const found = query ? matches(text, query) : [];
  const put = (from, to) => {
    const parts = document.createDocumentFragment();
    for (let i = from; i < to; i++) {
      const piece = text.slice(at, at + lengths[i]);
      const number = value?.(first + i);
      const kind = value ? shade(number, colouring) : "";
      const hit = found.some(([a, b]) => a < at + lengths[i] && b > at);
      parts.append(kind || hit || value ? h("span", { class: `${kind}${hit ? " hit" : ""}`, "data-i": first + i }, visible(piece)) : unhidden(piece));
      at += lengths[i];
    }
    place.append(parts);
    if (to < lengths.length) {
      const more = h("button", { class: "quiet", onclick: () => { more.remove(); put(to, lengths.length); } },
        `… ${lengths.length - to} more tokens`);
      place.append(more);
    }
  };
  put(0, Math.min(LONGEST, lengths.length));
  return place;
}

// A line break gets a sign, so that its colour can be seen; so do characters that turn the text around or have no width.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
const code = character => `‹${character.codePointAt(0).toString(16).padStart(2, "0")}›`;
const unhidden = text => text.replace(HIDDEN, code);
const visible = piece => unhidden(piece).replaceAll("\n", "↵\n");

function matches(text, query) {
  const found = [], low = text.toLowerCase(), wanted = query.toLowerCase();
  for (let at = low.indexOf(wanted); at >= 0 && found.length < 500; at = low.indexOf(wanted, at + wanted.length))
    found.push([at, at + wanted.length]);
  return found;
}

function marked(text, query) {
  if (!query) return [unhidden(text)];
  const parts = [];
  let at = 0;
  for (const [from, to] of matches(text, query)) {
    parts.push(unhidden(text.slice(at, from)), h("mark", {}, unhidden(text.slice(from, to))));
    at = to;
  }
  parts.push(unhidden(text.slice(at)));
  return parts;
}

function scale(name) {
  const { limits, signed, legend, about } = COLOURINGS[name];
  if (!limits) return null;
  const step = (kind, label) => h("span", { class: `step ${kind}` }, label);
  const ups = legend.map((label, i) => step(`${signed ? "up" : "much"}-${i + 1}`, signed ? `+${label.replace("> ", "")}` : label));
  const downs = signed ? legend.map((label, i) => step(`down-${i + 1}`, `−${label.replace("> ", "").split(" of ")[0]}`)).reverse() : [];
  return h("div", { class: "scale" }, h("span", { class: "steps" }, downs, ups), h("span", { class: "about" }, about));
}
