// The site searches in a worker, which a browser refuses a page that is opened from the disk. There this stands for it:
// the same script in a hidden frame.
if (location.protocol === "file:") {
  // A message is a copy, and arrives after the sender's work: either side changes its own.
  const later = (message, receive) => {
    const data = structuredClone(message);
    setTimeout(() => receive(new MessageEvent("message", { data })));
  };
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => later(data, (event) => this.onmessage?.(event));
      const script = this.inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror?.(event);
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else later(data, (event) => this.inside.dispatchEvent(event));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
