// A page that was opened from disk may not start a worker: a hidden frame runs the worker's script in its place, so that the
// search of this site needs no server. (The theme leaves out its own, which is fetched from elsewhere, where one has this name.)

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      (document.body ?? document.documentElement).append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => queueMicrotask(() => this.tell(new MessageEvent("message", { data })));
      inside.importScripts = async (...urls) => {
        for (const one of urls) await this.load(one);
      };
      this.load(url).then(
        () => this.flush(),
        () => this.tell(new ErrorEvent("error", { message: `${url} cannot be loaded` })),
      );
    }

    load(url) {
      const page = this.frame.contentDocument;
      return new Promise((resolve, reject) => {
        const script = page.createElement("script");
        Object.assign(script, { src: new URL(url, location.href).href, onload: resolve, onerror: reject });
        page.head.append(script);
      });
    }

    flush() {
      const sent = this.waiting;
      this.waiting = null;
      sent.forEach((data) => this.postMessage(data));
    }

    postMessage(data) {
      if (this.waiting) return this.waiting.push(data);
      return this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    tell(event) {
      this.dispatchEvent(event);
      this[`on${event.type}`]?.(event);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
