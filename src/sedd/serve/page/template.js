// Texts with gaps. In the editor {8} is a gap of eight tokens and any other brace is itself; the server wants other
// braces doubled. A part is {text} or {gap, was}, where `was` is the text that the gap replaced, or null.

const GAP = /\{([1-9]\d{0,5})\}/g;
const LONGEST_PIECE = 24;

export function parse(source) {
  const parts = [];
  let end = 0;
  for (const match of source.matchAll(GAP)) {
    if (match.index > end) parts.push({ text: source.slice(end, match.index) });
    parts.push({ gap: Number(match[1]), was: null });
    end = match.index + match[0].length;
  }
  if (end < source.length) parts.push({ text: source.slice(end) });
  return parts;
}

export function format(parts) {
  return parts.map((part) => ("gap" in part ? `{${part.gap}}` : part.text)).join("");
}

export function serverTemplate(parts) {
  return parts.map((part) => ("gap" in part ? `{${part.gap}}` : part.text.replace(/[{}]/g, "$&$&"))).join("");
}

// Keep what gaps replaced when the text around them is edited: gaps are matched in order while there are as many.
export function keepReplaced(parts, before) {
  const [gaps, old] = [parts, before].map((list) => list.filter((part) => "gap" in part));
  if (gaps.length === old.length) gaps.forEach((gap, i) => (gap.was = old[i].was));
  return parts;
}

// Join neighbouring texts and neighbouring gaps.
export function normalize(parts) {
  const joined = [];
  for (const part of parts) {
    const last = joined.at(-1);
    if (last && "gap" in last && "gap" in part) {
      const was = last.was === null && part.was === null ? null : (last.was ?? "") + (part.was ?? "");
      joined[joined.length - 1] = { gap: last.gap + part.gap, was };
    } else if (last && "text" in last && "text" in part) {
      joined[joined.length - 1] = { text: last.text + part.text };
    } else if ("gap" in part || part.text) {
      joined.push({ ...part });
    }
  }
  return joined;
}

// Split parts into pieces that can be clicked: words with the space before them, and gaps.
export function pieces(parts) {
  return parts.flatMap((part) => ("gap" in part ? [part] : words(part.text).map((text) => ({ text }))));
}

function words(text) {
  const found = [];
  let space = "";
  for (const { segment } of new Intl.Segmenter(undefined, { granularity: "word" }).segment(text)) {
    if (!segment.trim()) {
      space += segment;
      continue;
    }
    const units = segment.length > LONGEST_PIECE ? characters(segment) : [segment];
    for (const unit of units) {
      found.push(space + unit);
      space = "";
    }
  }
  if (space) found.push((found.pop() ?? "") + space);
  return found;
}

function characters(text) {
  return [...new Intl.Segmenter(undefined, { granularity: "grapheme" }).segment(text)].map(({ segment }) => segment);
}

// Links ------------------------------------------------------------------------------------------------------------

// A link holds everything that a run needs: {text, compare, colour, a: settings, b: settings}.
export function toFragment({ text, colour, a, b }) {
  const fields = new URLSearchParams({ text, colour });
  for (const [name, value] of Object.entries(a)) if (value !== "") fields.set(name, value);
  for (const [name, value] of Object.entries(b ?? {})) if (value !== "") fields.set(`b.${name}`, value);
  return fields.toString();
}

export function fromFragment(fragment) {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  if (!fields.has("text")) return null;
  const link = { text: fields.get("text"), colour: fields.get("colour"), a: {}, b: null };
  for (const [name, value] of fields) {
    if (name.startsWith("b.")) (link.b ??= {})[name.slice(2)] = value;
    else if (name !== "text" && name !== "colour") link.a[name] = value;
  }
  return link;
}
