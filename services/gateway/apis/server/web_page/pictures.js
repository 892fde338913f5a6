// Pictures of the next question: pasted or dropped, shown beside the message, and sent as data URLs.

const PICTURE_TYPES = /^image\/(png|jpeg|webp|gif|bmp)$/;
let pictures = []; // data URLs, oldest first

// What is sent of a question: a text, or parts if it has pictures.
function contentOf({ question, pictures: urls }) {
  if (!urls?.length) return question;
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return question ? [...parts, { type: "text", text: question }] : parts;
}

function takePictures() {
  const taken = pictures;
  pictures = [];
  showPictures();
  return taken;
}

function addPictures(files) {
  for (const file of files) {
    if (!PICTURE_TYPES.test(file.type)) continue;
    const reader = new FileReader();
    reader.addEventListener("load", () => { pictures.push(reader.result); showPictures(); });
    reader.readAsDataURL(file);
  }
}

function showPictures() {
  element("pictures").replaceChildren(...pictures.map((url, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Remove this picture";
    button.append(imageOf(url, `Picture ${index + 1}`));
    button.addEventListener("click", () => { pictures.splice(index, 1); showPictures(); element("prompt").focus(); });
    return button;
  }));
  element("pictures").hidden = !pictures.length;
  fitPrompt();
}

function imageOf(url, name) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = name;
  return image;
}

document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData?.files ?? []];
  if (files.some((file) => PICTURE_TYPES.test(file.type))) {
    event.preventDefault();
    addPictures(files);
  }
});
document.addEventListener("dragover", (event) => {
  if ([...event.dataTransfer?.types ?? []].includes("Files")) event.preventDefault(); // so that it may be dropped
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return;
  event.preventDefault();
  addPictures([...event.dataTransfer.files]);
});
