// The page "Will it fit?": finds the plan of the chosen point in window.FIT (benchmarks/results/fit.json) and shows it.
(() => {
  const data = window.FIT;
  const form = document.getElementById("fit-form");
  const answer = document.getElementById("fit-answer");
  if (!data || !form) return;
  const METHODS = { full: "Full: all parameters", lora: "LoRA", nf4: "LoRA over nf4 weights" };
  const BOUNDS = {
    compute: "compute on the card",
    h2d: "copies from host to card",
    d2h: "copies from card to host",
    nvme_read: "disk reads",
    nvme_write: "disk writes",
    update: "optimizer updates",
    collective: "exchange between cards",
    network: "network",
  };
  // The labels stand here, because a code host shows the text of a form without its fields.
  const LABELS = {
    model: "Model",
    method: "Method",
    card: "Card",
    count: "Number of cards",
    host: "Host memory",
    disk: "NVMe disk",
  };
  const KEYS = Object.keys(LABELS);
  const START = { model: "Llama-3.1-8B", method: "full", card: "rtx-4090", count: "1", host: "64", disk: "1" };
  const TOKENS = 1e7;

  const number = (value, digits = 3) =>
    value.toLocaleString("en", value >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
  const gib = (value) => `${number(value)} GiB`;
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const cards = { ...data.cards };
  for (const [key, covered] of Object.entries(data.covered)) {
    const { disk_gib } = data.cards[covered.plans_of[0]];
    cards[key] = { ...covered, device_gib: 0.9 * covered.memory_gib, disk_gib, hosts_gib: { 1: [] } };
  }

  const cardsWithPlans = (card) => cards[card].plans_of ?? [card];

  function plans({ model, method, card, count }) {
    const found = data.models[model]?.[method];
    const lists = cardsWithPlans(card).map((each) => found?.cards?.[each]?.[count]);
    return { rows: lists.some(Boolean) ? lists.flatMap((list) => list ?? []) : undefined, refusal: found?.refusal };
  }

  function hosts(card, count) {
    const planned = cards[card].hosts_gib[count];
    if (cards[card].shares_memory) return planned;
    return data.hosts_gib.filter((size) => !planned.length || size >= planned[0] / 2);
  }

  // Rows of the file: host GiB, disk, rows at a time, tokens a second, GiB of the device, GiB of the host, GiB of the
  // disk, lane; rows at a time is 0 where nothing fits, and three missing sizes follow.
  const hasHost = (row, host) => row[0] <= host || row[5] <= data.host_share * (host - data.system_gib);
  const hasDevice = (row, card) => !cards[card].plans_of || row[4] <= cards[card].device_gib;

  // The fastest plan that needs no more than the point has.
  function best(point) {
    const usable = (plans(point).rows ?? []).filter(
      (row) => row[2] && hasHost(row, +point.host) && row[1] <= point.disk && hasDevice(row, point.card),
    );
    return usable.reduce((first, row) => (first && first[3] >= row[3] ? first : row), null);
  }

  // The plan that does not fit with this much memory or with more; undefined: no plan says that nothing fits.
  function refused(point) {
    if (cards[point.card].plans_of) return undefined;
    const rows = plans(point).rows ?? [];
    return rows.find((row) => !row[2] && row[0] >= point.host && row[1] >= point.disk);
  }

  function* neighbors(point) {
    for (const [methodStep, method] of Object.keys(METHODS).entries()) {
      const from = Object.keys(METHODS).indexOf(point.method);
      if (methodStep < from) continue;
      for (const card of Object.keys(cards)) {
        for (const count of Object.keys(cards[card].hosts_gib)) {
          if (+count < +point.count && card === point.card) continue;
          for (const host of hosts(card, count)) {
            if (host < point.host && card === point.card) continue;
            for (const disk of [0, 1]) {
              if (disk < point.disk) continue;
              const steps = (now, before) => Math.abs(Math.log2(now / before));
              const cost =
                1.5 * (disk - point.disk) +
                steps(host, point.host) +
                2.5 * steps(count, point.count) +
                4 * (methodStep - from) +
                (card === point.card ? 0 : 5 + steps(cards[card].device_gib, cards[point.card].device_gib));
              yield { cost, point: { ...point, method, card, count, host: String(host), disk: String(disk) } };
            }
          }
        }
      }
    }
  }

  function smallestChange(point) {
    let found = null;
    for (const each of neighbors(point)) {
      if ((!found || each.cost < found.cost) && best(each.point)) found = each;
    }
    return found?.point;
  }

  const OLDER = "This plan was made before the last change of the machines' rates. The speed may be off by a third.";
  const WORDS = {
    method: (point) => METHODS[point.method],
    card: (point) => cards[point.card].name,
    count: (point) => plural(+point.count, "card"),
    host: (point) => `${gib(+point.host)} of host memory`,
    disk: () => "a disk",
  };
  const describeChange = (before, after) =>
    Object.keys(WORDS)
      .filter((key) => String(before[key]) !== String(after[key]))
      .map((key) => WORDS[key](after))
      .join(", ");

  function command(point, row) {
    const settings = { ...data.settings[point.method], "train.micro_batch_size": row[2] };
    if (row[1]) settings["offload.nvme_dir"] = "/nvme";
    const words = [`offload train${+point.count > 1 ? ` --gpus ${point.count}` : ""}`];
    words.push(`--model.path ${data.hubs[point.model]}`, "--data.source FILE");
    words.push(...Object.entries(settings).map(([key, value]) => `--${key} ${value}`));
    return words.join(" \\\n    ");
  }

  function bar(name, used, available, note) {
    const share = available ? Math.min(100, (100 * used) / available) : 0;
    const fill = make("span", { className: "fit-fill" });
    fill.style.width = `${share}%`;
    const track = make("span", { className: "fit-track", ariaHidden: "true" }, fill);
    const text = available ? `${gib(used)} of ${gib(available)}` : "none";
    const label = make("span", { className: "fit-bar-label" }, make("b", {}, name), note ? ` ${note}` : "");
    return make("li", {}, label, make("span", { className: "fit-bar-value" }, text), track);
  }

  function bars(point, row) {
    const card = cards[point.card];
    const disk = +point.disk ? card.disk_gib : 0;
    const each = +point.count > 1 ? "on each card" : "";
    return make(
      "ul",
      { className: "fit-bars", ariaLabel: "Memory in use by tier" },
      bar("Device", row[4], card.device_gib, each),
      bar("Host", row[5], point.host - data.system_gib, card.shares_memory ? "in the same memory" : ""),
      bar("Disk", row[6], disk, ""),
    );
  }

  function facts(pairs) {
    return make(
      "dl",
      { className: "fit-facts" },
      ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
  }

  function copyButton(text) {
    const button = make("button", { type: "button", className: "fit-button" }, "Copy the command");
    button.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(text);
      button.textContent = "Copied";
    });
    return navigator.clipboard ? [button] : [];
  }

  function speed(row) {
    const hours = TOKENS / row[3] / 3600;
    return [
      ["Speed (forecast)", `${number(row[3])} tokens/s`],
      ["10 million tokens", hours >= 1 ? `${number(hours)} hours` : `${number(60 * hours)} minutes`],
      ["Bottleneck", BOUNDS[row[7]] ?? row[7]],
    ];
  }

  function showFit(point, row) {
    const words = command(point, row);
    const { plans_of, note } = cards[point.card];
    const code = make("pre", { className: "fit-command", tabIndex: 0, role: "group", ariaLabel: "Command" }, words);
    return [
      make("p", { className: "fit-verdict fit-yes" }, "It fits."),
      plans_of ? facts([["Speed", "unknown: no plan of this card"]]) : facts(speed(row)),
      note ? make("p", {}, note) : "",
      data.older.includes(`${point.model}, ${point.method}, ${point.card}`) ? make("p", {}, OLDER) : "",
      bars(point, row),
      +point.disk && !row[1] ? make("p", {}, "The plan does not use the disk.") : "",
      make("p", {}, "Command:"),
      code,
      ...copyButton(words),
    ];
  }

  // Weights and optimizer states may lie on the card, the host or the disk. So a shortage on the card alone may end with
  // more room elsewhere.
  function missing(row, point, change) {
    const names = ["device memory", "host memory", "disk"];
    const short = names.map((name, index) => [name, row[3 + index]]).filter(([, size]) => size > 0);
    const host = short.filter(([name]) => name !== "device memory");
    const text = (host.length ? host : short).map(([name, size]) => `${gib(size)} of ${name}`).join(", ");
    if (host.length || change?.card !== point.card) return `At least ${text} is missing.`;
    return `At least ${gib(short[0][1])} of memory is missing. The card has no room for it, but the host or a disk can hold it.`;
  }

  function unknown(point) {
    if (cards[point.card].plans_of) return "This card has no plans of its own, and those of smaller cards need more than it has.";
    const fitting = plans(point).rows.filter((row) => row[2] && row[1] <= point.disk);
    const least = Math.min(...fitting.map((row) => row[5] + data.system_gib));
    return fitting.length ? `This size was not planned. The nearest plan takes ${gib(least)} of host memory.` : "This size was not planned.";
  }

  function showMisfit(point, row) {
    const change = smallestChange(point);
    const parts = row
      ? [make("p", { className: "fit-verdict fit-no" }, "It does not fit."), make("p", {}, missing(row, point, change))]
      : [make("p", { className: "fit-verdict fit-no" }, "No plan fits."), make("p", {}, unknown(point))];
    if (!change) return [...parts, make("p", {}, "No other machine on this page fits either.")];
    const button = make("button", { type: "button", className: "fit-button" }, "Show this plan");
    button.addEventListener("click", () => {
      choose(change);
      form.elements.model.focus();
    });
    const words = "The smallest change that fits:";
    return [...parts, make("p", {}, `${words} ${describeChange(point, change)}.`), button];
  }

  function show(point) {
    const { rows, refusal } = plans(point);
    const row = best(point);
    if (row) return answer.replaceChildren(...showFit(point, row));
    if (!rows) {
      const why = refusal ? `There is no forecast of this method for this model: ${refusal}` : "This point has no plan yet.";
      return answer.replaceChildren(make("p", { className: "fit-verdict fit-no" }, "No plan."), make("p", {}, why));
    }
    answer.replaceChildren(...showMisfit(point, refused(point)));
  }

  function fill(key, options, chosen) {
    const select = form.elements[key];
    select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    const values = options.map(([value]) => String(value));
    const nearest = () => values.reduce((near, each) => (Math.abs(each - chosen) < Math.abs(near - chosen) ? each : near));
    select.value = values.includes(String(chosen)) ? chosen : isNaN(chosen) ? values[0] : nearest();
    select.disabled = options.length < 2;
    return select.value;
  }

  const billions = (count) => (count >= 1e9 ? `${number(count / 1e9)} billion` : `${number(count / 1e6)} million`);

  function choose(wanted) {
    const sorted = Object.entries(cards).sort(([, a], [, b]) => a.device_gib - b.device_gib);
    const point = {};
    point.model = fill("model", Object.keys(data.models).map((name) => [name, name]), wanted.model);
    point.method = fill("method", Object.entries(METHODS), wanted.method);
    point.card = fill("card", sorted.map(([key, card]) => [key, `${card.name}, ${gib(card.memory_gib)}`]), wanted.card);
    point.count = fill("count", Object.keys(cards[point.card].hosts_gib).map((each) => [each, each]), wanted.count);
    point.host = fill("host", hosts(point.card, point.count).map((each) => [each, gib(each)]), wanted.host);
    const disk = cards[point.card].disk_gib;
    point.disk = fill("disk", disk ? [[0, "none"], [1, gib(disk)]] : [[0, "none"]], wanted.disk);
    show(point);
    history.replaceState(null, "", `?${new URLSearchParams(point)}${location.hash}`);
  }

  for (const [key, text] of Object.entries(LABELS)) {
    const select = make("select", { id: `fit-${key}`, name: key });
    form.append(make("label", { htmlFor: select.id }, text, select));
  }
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => choose(Object.fromEntries(KEYS.map((key) => [key, form.elements[key].value]))));
  choose({ ...START, ...Object.fromEntries(new URLSearchParams(location.search)) });
})();
