// Two settings in ComfyUI's dialog, which our server follows. What the server's environment says stays as it is.

// @ts-ignore  (a module of the front end)
import { app } from "../../scripts/app.js";
// @ts-ignore  (a module of the front end)
import { api } from "../../scripts/api.js";

const ROUTE = "/lazy_h3/settings";
const SETTINGS = [
  {
    id: "LazyH3.EveryPrompt",
    field: "every_prompt",
    name: "Make the loaders of every prompt lazy",
    tooltip: "ComfyUI's own loaders become the lazy ones as a prompt is queued. The open workflow stays as it is.",
  },
  {
    id: "LazyH3.DropLoaders",
    field: "drop_loaders",
    name: "Also drop what other loaders have cached, after its last use",
    tooltip: "Frees models that have no lazy loader; they are loaded again in the next run. Only in prompts with nodes of Lazy H3.",
  },
];
let isReady = false; // before that, the dialog tells its defaults, not what the user has saved

app.registerExtension({
  name: "LazyH3.Settings",
  settings: SETTINGS.map(({ id, field, name, tooltip }) => ({
    id,
    category: ["Lazy H3", "Other loaders", name],
    name,
    tooltip,
    type: "boolean",
    defaultValue: false,
    onChange: (value) => (isReady ? send({ [field]: value === true }) : undefined),
  })),
  async setup() {
    const saved = SETTINGS.map(({ id, field }) => [field, app.extensionManager.setting.get(id) === true]);
    isReady = true;
    await send(Object.fromEntries(saved));
  },
});

/** Tell the server; say so where it did not follow. */
async function send(values) {
  const answer = await api.fetchApi(ROUTE, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(values),
  });
  const document = await answer.json();
  if (!answer.ok) {
    warn(document.error.message);
    return;
  }
  const ignored = Object.keys(values).filter((name) => values[name] && !document.settings[name]);
  if (ignored.length) warn(`The server's environment keeps this off: ${ignored.join(", ")}.`);
}

function warn(detail) {
  const title = "Lazy H3: the setting was not taken";
  const { toast } = app.extensionManager;
  if (typeof toast.warning === "function") toast.warning(title, { description: detail });
  else toast.add({ severity: "warn", summary: title, detail });
}
