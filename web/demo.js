// Makes the editor's default workflow one that runs: wired to the model that comes with the server.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

const CHECKPOINT = "latentloom-demo.safetensors";
const WORKFLOW = new URL("./demo_workflow.json", import.meta.url);

async function demoCheckpointIsInstalled() {
  const response = await api.fetchApi("/models/checkpoints");
  return response.ok && (await response.json()).includes(CHECKPOINT);
}

async function useDemoAsDefaultWorkflow() {
  const workflow = await (await fetch(WORKFLOW)).json();
  const { defaultGraph } = window.comfyAPI.defaultGraph;
  // The editor clones this very object whenever it needs its default workflow.
  for (const key of Object.keys(defaultGraph)) delete defaultGraph[key];
  Object.assign(defaultGraph, workflow);
}

app.registerExtension({
  name: "latentloom.demo",

  async init() {
    if (await demoCheckpointIsInstalled()) await useDemoAsDefaultWorkflow();
  },

  async setup() {
    const settings = app.extensionManager.setting;
    // A first visit would end in the template browser, whose workflows need models to download first.
    if (!settings.get("Comfy.TutorialCompleted")) await settings.set("Comfy.TutorialCompleted", true);
  },
});
