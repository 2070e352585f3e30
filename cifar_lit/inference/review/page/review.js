"use strict";

const find = (id) => document.getElementById(id);
const details = new Map(); // promises of images by number
let state = null; // what the service says about all images
let current = null; // number of the image on the page
let busy = false;

const percent = (value) => `${(100 * value).toFixed(value > 0.9995 || value < 0.0005 ? 2 : 1)} %`;
const matches = (image) => !find("filter").value || (image.label ?? image.predicted) === find("filter").value;
const open = () => state.images.flatMap((image, item) => (image.action || !matches(image) ? [] : [item]));

async function ask(path, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, options).catch(() => {
    throw new Error("The service does not answer. Is it still running?");
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function load(item) {
  if (!details.has(item)) details.set(item, ask(`image/${item}`));
  if (details.size > 50) details.delete(details.keys().next().value);
  return details.get(item);
}

function element(kind, text, properties = {}) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(text);
  return made;
}

function withKey(text, key) {
  const parts = document.createDocumentFragment();
  parts.append(text, " ", element("kbd", key));
  return parts;
}

function sharp(event) { // enlarged pixels stay visible
  event.target.classList.toggle("pixels", event.target.naturalWidth < 100);
}

// The nine classes with keys: all in their order, or the most probable ones if there are more than ten.
const keyed = (top) => (state.classes.length > 10 ? top.map(([name]) => name) : state.classes);

function listClasses(top) {
  const text = find("search").value.trim().toLowerCase();
  const names = text ? state.classes.filter((name) => name.toLowerCase().includes(text)) : keyed(top);
  const first = names.filter((name) => name.toLowerCase().startsWith(text));
  const sorted = text ? [...first, ...names.filter((name) => !first.includes(name))].slice(0, 50) : names;
  find("classes").replaceChildren(
    ...sorted.map((name, place) => {
      const key = text ? (place ? "" : "Enter") : "1234567890"[place];
      return element("button", key ? withKey(name, key) : name, { onclick: () => decide("relabel", name) });
    }),
  );
}

async function show(item) {
  const image = state.images[item], { label, predicted } = image;
  current = item;
  const shown = await load(item);
  if (current !== item) return;
  const share = shown.top.find(([name]) => name === label);
  find("picture").src = shown.picture;
  find("picture").hidden = !shown.picture;
  find("picture").alt = label ? `image to review, labelled ${label}` : "image to label";
  find("question").textContent = `Is this “${label ?? predicted}”?`;
  const own = !label || label === predicted ? "" : share ? `, ${label} with ${percent(share[1])}` : `, hardly ${label}`;
  find("detail").textContent =
    `The net predicts ${predicted} with ${percent(image.probability)}${own}. ` +
    `${/^\d+$/.test(image.name) ? "Image " : ""}${image.name}${image.heldOut ? ", validation image" : ""}.${shown.picture ? "" : " The file cannot be read."}`;
  find("keep").replaceChildren(withKey(label ? `Keep ${label}` : `Accept ${predicted}`, "K"));
  find("predicted").hidden = !label || label === predicted;
  find("predicted").replaceChildren(withKey(`Change to ${predicted}`, "P"));
  find("search").value = "";
  listClasses(shown.top);
  find("nearest").replaceChildren(
    ...shown.nearest.map((near) => {
      const frame = element("div", "", { className: "frame" });
      frame.append(element("img", "", { src: near.picture, alt: `training image, labelled ${near.label}`, onload: sharp }));
      const row = element("li", frame);
      const changed = (label ?? predicted) === near.label ? "" : "other";
      row.append(element("span", near.label, { className: changed, title: `cosine ${near.cosine}` }));
      return row;
    }),
  );
  find("status").textContent = `${find("question").textContent} ${find("detail").textContent}`;
  find("error").hidden = true;
}

function progress() {
  const ours = state.images.filter(matches);
  const count = (action) => ours.filter((image) => image.action === action).length;
  const decided = ours.filter((image) => image.action).length;
  find("bar").value = decided / Math.max(1, ours.length);
  find("progress").textContent =
    `${decided} of ${ours.length} reviewed · ${count("relabel")} changed · ${count("drop")} dropped · ${count("skip")} skipped`;
  return count("skip");
}

async function next(item) {
  const skipped = progress(), remaining = open();
  item ??= remaining.find((one) => one > current) ?? remaining[0];
  find("review").hidden = item === undefined;
  find("end").hidden = item !== undefined;
  if (item === undefined) {
    current = null;
    find("done").textContent = "All images of this list are reviewed.";
    find("again").hidden = !skipped;
    find("written").textContent = "";
  } else {
    await show(item);
    const after = remaining.find((one) => one > item);
    if (after !== undefined) load(after).catch(() => details.delete(after));
  }
}

function guarded(work) { // one request at a time, so that a held key decides about one image only
  return async (...values) => {
    if (busy) return;
    busy = true;
    try {
      await work(...values);
    } catch (error) {
      details.delete(current);
      find("error").textContent = error.message;
      find("error").hidden = false;
    } finally {
      busy = false;
    }
  };
}

const decide = guarded(async (action, label) => {
  if (current === null && action !== "undo") return;
  const { item, name, ...change } = await ask("decide", { item: current, action, label });
  if (item !== null) state.images[item] = { ...state.images[item], action: undefined, now: null, ...change };
  await next(action === "undo" && item !== null ? item : undefined);
  if (action === "undo" && item === null) find("status").textContent = `The decision about ${name} is undone.`;
});
const again = guarded(async () => {
  for (const image of state.images) if (image.action === "skip") image.action = undefined;
  await next();
});
const write = guarded(async () => {
  const { rows } = await ask("write", {});
  find("written").textContent = `${rows} rows are written. This command trains with them:`;
});

const keys = { k: "keep", p: "predicted", d: "drop", s: "skip", u: "undo" };
addEventListener("keydown", (event) => {
  const typing = event.target.id === "search", button = find(keys[event.key.toLowerCase()] ?? "none");
  if (event.altKey || (event.metaKey || event.ctrlKey) && event.key !== "z") return;
  if (event.key === "z" && (event.ctrlKey || event.metaKey) && !typing) decide("undo");
  else if (event.key === "Escape" && typing) event.target.blur();
  else if (event.key === "Enter" && typing && event.target.value) find("classes").firstElementChild?.click(), event.target.blur();
  else if (typing || event.target.id === "filter" || event.repeat) return;
  else if (event.key === "/") find("search").focus(), event.preventDefault();
  else if (/^\d$/.test(event.key)) find("classes").children[(Number(event.key) + 9) % 10]?.click();
  else if (button && !button.hidden) button.click();
});
for (const action of ["keep", "drop", "skip", "undo"]) find(action).onclick = () => decide(action);
find("predicted").onclick = () => decide("relabel", state.images[current].predicted);
find("back").onclick = () => decide("undo");
find("again").onclick = again;
find("write").onclick = write;
find("picture").onload = sharp;
find("filter").onchange = guarded(() => next());
find("search").oninput = async () => listClasses((await load(current)).top);

guarded(async () => {
  state = await ask("images");
  document.title = `Review labels · ${state.run}`;
  find("command").textContent = state.command;
  find("filter").append(element("option", "all", { value: "" }), ...state.classes.map((name) => element("option", name)));
  await next();
})();
