"use strict";

const find = (id) => document.getElementById(id);
const details = new Map(); // promises of images by number
let state = null; // what the service says about all images
let current = null; // number of the image on the page
let given = new Set(); // its labels on the page, if an image has several
const decided = []; // numbers of images, to go back

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const isDigit = (text) => /^\d$/.test(text);
const matches = (image) => {
  const wanted = find("filter").value, text = image.label ?? image.predicted;
  return !wanted || text === wanted || (state.several && labelsOf(text).has(wanted));
};

async function ask(path, body) {
  const response = await fetch(path, body && { method: "POST", body: JSON.stringify(body) }).catch(() => {
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

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

const labelsOf = (text) => new Set(text ? text.split("|") : []);
const inWords = (text) => (state.several ? text.split("|").join(", ") || "none of the labels" : text);

// The labels on the page in the form of a table, in the order of the classes.
const joined = () => [...state.classes.filter((name) => given.has(name)), ...[...given].filter((name) => !state.classes.includes(name))].join("|");
const withKey = (text, key) => (key ? [text, " ", element("kbd", {}, key)] : [text]);
const sharpen = ({ target }) => target.classList.toggle("pixels", target.naturalWidth < 100);

// Classes called 0 … 9 have their names as keys. Otherwise up to ten classes have the same keys for all images; of more
// classes, the most probable ones have keys. Keys do not change when a class is added.
function listClasses(top) {
  const digits = state.classes.filter(isDigit);
  const typed = find("search").value.trim().normalize("NFC").replace(/\s+/g, " ");
  const text = typed.toLowerCase();
  const rank = (name) => (name.toLowerCase().startsWith(text) ? 0 : 1);
  let names = state.classes;
  if (state.known > 10) names = [...new Set([...top.map(([name]) => name), ...digits, ...names.slice(state.known)])];
  if (text) names = state.classes.filter((name) => name.toLowerCase().includes(text)).sort((a, b) => rank(a) - rank(b));
  const keyOf = (name, place) => (digits.length ? digits.find((digit) => digit === name) : "1234567890"[place]);
  const button = (name, place) => {
    const key = text ? (place ? "" : "Enter") : keyOf(name, place);
    const made = element("button", { value: key ?? "", onclick: () => choose(name) }, ...withKey(name, key));
    if (state.several) made.ariaPressed = given.has(name);
    return made;
  };
  find("classes").replaceChildren(...names.slice(0, 50).map(button));
  if (!text || !state.open || names.some((name) => name.toLowerCase() === text)) return;
  const onclick = () => {
    if (confirm(`There is no class “${typed}” yet. Add it?`)) choose(typed);
    else find("search").focus();
  };
  const words = withKey(`New class “${typed}”`, names.length ? "" : "Enter");
  find("classes").append(element("button", { onclick }, ...words));
}

// A class is the decision; one of several labels is switched on or off.
async function choose(name) {
  if (!state.several) return decide("relabel", name);
  given.delete(name) || given.add(name);
  find("search").value = "";
  listClasses((await load(current)).top);
  nameKeep();
}

// What K does: keep the label, or save the labels that are switched on.
function nameKeep() {
  const { label, predicted } = state.images[current];
  let text = label === null ? `Accept ${inWords(predicted)}` : `Keep ${inWords(label)}`;
  if (state.several && joined() !== (label ?? predicted)) text = `Save ${inWords(joined())}`;
  find("keep").replaceChildren(...withKey(text, "K"));
}

async function show(item) {
  current = item;
  const { name, label, predicted, probability, action, now } = state.images[item];
  const { picture, top, nearest } = await load(item);
  Object.assign(find("picture"), { src: picture, hidden: !picture });
  find("picture").alt = label ? `image to review, labelled ${label}` : "image to label";
  given = labelsOf(now ?? label ?? predicted);
  find("question").textContent = `Is this “${inWords(label ?? predicted)}”?`;
  const own = top.find(([one]) => one === label && label !== predicted);
  find("detail").textContent =
    `The net predicts ${inWords(predicted)} with ${percent(probability)}${own ? `, ${label} with ${percent(own[1])}` : ""}. ` +
    (/^\d+$/.test(name) ? `Image ${name}.` : `${name}.`) + (picture ? "" : " The file cannot be read.") +
    (action ? ` Decided: ${action} ${now === undefined || now === null ? "" : inWords(now)}` : "");
  nameKeep();
  find("predicted").replaceChildren(...withKey(`Change to ${inWords(predicted)}`, "P"));
  find("predicted").hidden = label === null || label === predicted;
  find("search").value = "";
  listClasses(top);
  const neighbour = ([src, near]) => {
    const image = element("img", { src, alt: `training image, labelled ${near}`, onload: sharpen });
    const kind = near === (label ?? predicted) ? "" : "other";
    return element("li", { className: kind, title: near }, element("div", { className: "frame" }, image), inWords(near));
  };
  find("nearest").replaceChildren(...nearest.map(neighbour));
  find("status").textContent = `${find("question").textContent} ${find("detail").textContent}`;
  find("error").hidden = true;
}

// A wrong label stays unsuspected if the predictor errs to the same class. Suspected labels that were kept are its errors.
function showEnd(suspects, isLast) {
  const count = (...actions) => suspects.filter((image) => actions.includes(image.action)).length;
  const wrong = count("relabel", "drop"), kept = count("keep");
  const error = kept / state.count / Math.max(1, state.classes.length - 1);
  const missed = Math.round((wrong * error) / (1 - error));
  find("beyond").hidden = isLast;
  find("bound").textContent = isLast ? "All images of this list are shown" : "The suspected labels end here";
  let text = `Of ${suspects.length} suspected labels, ${wrong} were wrong. `;
  if (!find("filter").value && wrong + kept === suspects.length) {
    text += `Among the ${state.count - suspects.length} others, expect ${missed ? `about ${missed}` : "hardly any"}.`;
  }
  find("rest").textContent = state.suspects === null ? "" : text;
}

async function next(item) {
  const listed = state.images.filter(matches), suspects = listed.filter((image) => image.item < (state.suspects ?? Infinity));
  const others = listed.slice(suspects.length);
  const count = (action) => listed.filter((image) => image.action === action).length;
  const reviewed = (images) => images.filter((image) => image.action && image.action !== "skip").length;
  const isBeyond = state.beyond || others.some((image) => image.action);
  const shown = isBeyond ? listed : suspects;
  find("bar").value = reviewed(shown) / Math.max(1, shown.length);
  find("progress").textContent = `${reviewed(shown)} of ${shown.length} ${state.suspects === null || isBeyond ? "" : "suspected labels "}` +
    `reviewed · ${count("relabel")} changed · ${count("drop")} dropped · ${count("skip")} skipped`;
  const open = (isBeyond ? listed : suspects).filter((image) => !image.action).map((image) => image.item);
  item ??= open.find((one) => one > (current ?? -1)) ?? open[0] ?? null;
  find("review").hidden = item === null;
  find("end").hidden = item !== null;
  find("again").hidden = !count("skip");
  showEnd(suspects, shown.length === listed.length);
  find("table").hidden = true;
  if (item === null) return void (current = null);
  await show(item);
  const after = open.find((one) => one > item);
  if (after) load(after).catch(() => details.delete(after));
}

// One action at a time: a key that is pressed before the next image appears does nothing.
const guarded = (work) => async (...values) => {
  if (document.body.ariaBusy === "true") return;
  document.body.ariaBusy = "true";
  try {
    await work(...values);
  } catch (error) {
    details.delete(current);
    find("error").textContent = error.message;
    find("error").hidden = false;
  }
  document.body.ariaBusy = "false";
};

const decide = guarded(async (action, label) => {
  Object.assign(state.images[current], await ask("decide", { item: current, action, label }));
  for (const name of state.several ? labelsOf(label) : label ? [label] : []) {
    if (!state.classes.includes(name)) state.classes.push(name);
  }
  decided.push(current);
  await next();
});
const goBack = guarded(async () => {
  if (decided.length) await next(decided.pop());
});
const actions = {
  keep: () => {
    const { label, predicted } = state.images[current];
    const isChanged = state.several && joined() !== (label ?? predicted);
    return isChanged ? decide("relabel", joined()) : decide("keep");
  },
  predicted: () => decide("relabel", state.images[current].predicted),
  drop: () => decide("drop"),
  skip: () => decide("skip"),
  back: goBack,
  last: goBack,
  beyond: guarded(async () => {
    state.beyond = true;
    await next();
  }),
  again: guarded(async () => {
    for (const image of state.images) if (image.action === "skip") image.action = undefined;
    await next();
  }),
  write: guarded(async () => {
    find("written").textContent = `${(await ask("write", {})).rows} rows are written. Train with them:`;
    find("table").hidden = false;
  }),
};
for (const [id, action] of Object.entries(actions)) find(id).onclick = action;

addEventListener("keydown", (event) => {
  const typing = event.target === find("search"), control = event.ctrlKey || event.metaKey;
  const button = find({ k: "keep", p: "predicted", d: "drop", s: "skip", b: "back", w: "write" }[event.key.toLowerCase()]);
  if (typing) {
    if (event.key === "Escape") {
      event.target.value = "";
      event.target.oninput();
    }
    if (event.key === "Enter" || event.key === "Escape") event.target.blur();
    if (event.key === "Enter" && event.target.value) find("classes").firstElementChild?.click();
  } else if (control && event.key === "z") goBack();
  else if (control || event.altKey || event.repeat || !find("keys").checked) return;
  else if (event.key === "/") find("search").focus(), event.preventDefault();
  else if (button || isDigit(event.key)) {
    event.preventDefault(); // the filter would choose the class that begins with this letter
    const chosen = button ?? find("classes").querySelector(`[value="${event.key}"]`);
    if (current === null ? ["back", "write"].includes(chosen?.id) : chosen && !chosen.hidden) chosen.click();
  }
});
find("picture").onload = sharpen;
find("filter").onchange = guarded(() => next());
find("keys").onchange = () => {
  localStorage.keys = find("keys").checked;
  document.body.classList.toggle("silent", !find("keys").checked);
};
find("search").oninput = async () => listClasses((await load(current)).top);

guarded(async () => {
  state = await ask("images");
  state.images.forEach((image, item) => Object.assign(image, { item }));
  find("keys").checked = localStorage.keys !== "false";
  find("keys").onchange();
  decided.push(...[...state.images.keys()].filter((item) => state.images[item].action));
  document.title = `Review labels · ${state.run}`;
  find("command").textContent = state.command;
  find("filter").append(...["", ...state.classes.slice(0, state.known)].map((value) => element("option", { value }, value || "all")));
  await next();
})();
