"""Fifty texts of many kinds and lengths: what people type, code, tables, other scripts, bytes."""

_STORY = (
    "The ferry left the harbour an hour late, because the captain's dog had run off after a gull. "
    "Nobody on board minded much: the sun stood high, somebody had brought a guitar, and the cook "
    "handed out bread that was still warm. Only the postman looked at his watch. "
)
_REPORT = (
    "Item 4. The committee notes that the bridge was inspected in March, that two of its bearings "
    "show wear, and that repair is planned before the winter. The cost is met from the reserve. "
)
_LOG = "2024-03-17 08:15:42 INFO worker-3 finished job 8842 in 131 ms\n"

PROMPTS = (
    "Hello",
    "The",
    "1",
    "\n",
    "Once upon a time",
    "The capital of France is",
    "Here is the English alphabet: ABC",
    "What is the largest planet of our solar system?",
    "Q: How many legs does a spider have?\nA:",
    "Translate into German: Good morning, my friends.",
    "To be, or not to be, that is",
    "The three primary colours are red,",
    "2, 4, 6, 8, 10,",
    "x  12\n\n7",
    "3.14159265358979",
    "17 + 25 = 42\n33 + 9 = 42\n20 + 22 =",
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\ndef main() -> None:\n    for path in sys.argv[1:]:\n",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "<html>\n<head><title>Recipes</title></head>\n<body>\n<h1>",
    "| city | country |\n|---|---|\n| Rome | Italy |\n| Lisbon |",
    "- milk\n- eggs\n- flour\n-",
    "Dear Ms Okafor,\n\nthank you for your letter of 3 May. ",
    "Subject: Meeting on Thursday\n\nHi all,\n\n",
    "Le chat est assis sur",
    "Der schnelle braune Fuchs springt",
    "El perro de mi vecino",
    "Привет, как",
    "东京是日本的",
    "東京は日本の",
    "안녕하세요",
    "مرحبا",
    "Ελλάδα",
    "The emoji 🎉 means",
    "naïve café — “quoted”",
    "ALL CAPITALS ARE HARD TO",
    "a b c d e f g h i j",
    "asdf qwer zxcv",
    "    indented text\n        more of it\n",
    "Water boils at 100 degrees Celsius. Water freezes at",
    "Roses are red, violets are blue,",
    "My favourite things about autumn are",
    "Step 1: Preheat the oven.\nStep 2: Mix flour and butter.\nStep 3:",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    _STORY,
    _REPORT * 3 + "Item 5. The committee",
    _LOG * 6,
    _STORY + _REPORT * 2 + "In short:",
)
