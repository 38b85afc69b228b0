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
  const KEYS = ["model", "method", "card", "count", "host", "disk"];
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

  function plans({ model, method, card, count }) {
    const found = data.models[model]?.[method];
    return { rows: found?.cards?.[card]?.[count], refusal: found?.refusal };
  }

  // The fastest plan that needs no more than the point has. Rows of the file: host GiB, disk, rows at a time, tokens a
  // second, GiB of the device, GiB of the host, GiB of the disk, lane; rows at a time is 0 where nothing fits.
  function best(point) {
    const usable = (plans(point).rows ?? []).filter((row) => row[2] && row[0] <= point.host && row[1] <= point.disk);
    return usable.reduce((first, row) => (first && first[3] >= row[3] ? first : row), null);
  }

  function* neighbors(point) {
    const cards = Object.keys(data.cards);
    for (const [methodStep, method] of Object.keys(METHODS).entries()) {
      const from = Object.keys(METHODS).indexOf(point.method);
      if (methodStep < from) continue;
      for (const card of cards) {
        const sizes = data.cards[card].hosts_gib;
        for (const count of Object.keys(sizes)) {
          if (+count < +point.count && card === point.card) continue;
          for (const host of sizes[count]) {
            if (host < point.host && card === point.card) continue;
            for (const disk of [0, 1]) {
              if (disk < point.disk) continue;
              const steps = (now, before) => Math.abs(Math.log2(now / before));
              const cost =
                1.5 * (disk - point.disk) +
                steps(host, point.host) +
                2.5 * steps(count, point.count) +
                4 * (methodStep - from) +
                (card === point.card ? 0 : 5 + steps(data.cards[card].device_gib, data.cards[point.card].device_gib));
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

  const WORDS = {
    method: (point) => METHODS[point.method],
    card: (point) => data.cards[point.card].name,
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
    words.push(`--model.path /models/${point.model}`, "--data.source FILE");
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
    const card = data.cards[point.card];
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

  function showFit(point, row) {
    const words = command(point, row);
    const hours = TOKENS / row[3] / 3600;
    const code = make("pre", { className: "fit-command", tabIndex: 0, role: "group", ariaLabel: "Command" }, words);
    return [
      make("p", { className: "fit-verdict fit-yes" }, "It fits."),
      facts([
        ["Speed (forecast)", `${number(row[3])} tokens/s`],
        ["10 million tokens", hours >= 1 ? `${number(hours)} hours` : `${number(60 * hours)} minutes`],
        ["Bottleneck", BOUNDS[row[7]] ?? row[7]],
      ]),
      bars(point, row),
      +point.disk && !row[1] ? make("p", {}, "The plan does not use the disk.") : "",
      make("p", {}, "Command:"),
      code,
      ...copyButton(words),
    ];
  }

  function missing(row) {
    const names = ["device memory", "host memory", "disk"];
    const short = names.map((name, index) => [name, row[3 + index]]).filter(([, size]) => size > 0);
    // More host memory also takes what the device has no room for.
    const host = short.filter(([name]) => name !== "device memory");
    return (host.length ? host : short).map(([name, size]) => `${gib(size)} of ${name}`).join(", ");
  }

  function showMisfit(point, row) {
    const short = row && missing(row);
    const change = smallestChange(point);
    const parts = [make("p", { className: "fit-verdict fit-no" }, "It does not fit.")];
    if (short) parts.push(make("p", {}, `At least ${short} is missing.`));
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
    const exact = rows.find((each) => !each[2] && each[0] === +point.host && each[1] === +point.disk);
    answer.replaceChildren(...showMisfit(point, exact));
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
    const cards = Object.entries(data.cards).sort(([, a], [, b]) => a.device_gib - b.device_gib);
    const point = {};
    point.model = fill("model", Object.keys(data.models).map((name) => [name, name]), wanted.model);
    point.method = fill("method", Object.entries(METHODS), wanted.method);
    point.card = fill("card", cards.map(([key, card]) => [key, `${card.name}, ${gib(card.memory_gib)}`]), wanted.card);
    const sizes = data.cards[point.card].hosts_gib;
    point.count = fill("count", Object.keys(sizes).map((each) => [each, each]), wanted.count);
    point.host = fill("host", sizes[point.count].map((each) => [each, gib(each)]), wanted.host);
    const disk = data.cards[point.card].disk_gib;
    point.disk = fill("disk", disk ? [[0, "none"], [1, gib(disk)]] : [[0, "none"]], wanted.disk);
    show(point);
    history.replaceState(null, "", `?${new URLSearchParams(point)}${location.hash}`);
  }

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => choose(Object.fromEntries(KEYS.map((key) => [key, form.elements[key].value]))));
  choose({ ...START, ...Object.fromEntries(new URLSearchParams(location.search)) });
})();
