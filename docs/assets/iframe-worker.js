// Search in pages that are opened from a folder: browsers start no worker from file://, so a hidden frame is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const base = new URL(url, location)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      const tell = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const loaded = source => new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: new URL(source, base).href, onload: done, onerror: failed })
        inside.document.body.appendChild(script)
      })
      inside.postMessage = tell
      inside.importScripts = (...sources) => sources.reduce((last, each) => last.then(() => loaded(each)), Promise.resolve())
      this.frame = frame
      this.ready = loaded(base)
      this.ready.catch(() => this.dispatchEvent(new Event("error")))
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
