// Browsers start no worker from a file on the disk. There the search runs in a hidden frame that looks like one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      const script = inside.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((done) => script.addEventListener("load", done));
      inside.document.body.append(script);
    }

    postMessage(data) {
      const sent = structuredClone(data);
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: sent })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
