"""Tables of images: accepted formats, their meaning, and refused tables."""

from __future__ import annotations

import json
import unicodedata
from functools import partial
from pathlib import Path

import pytest
from own_images import damage, open_set, save, values

from cifar_lit.base.errors import Failure, UsageError
from cifar_lit.data.datamodule import ImageData
from cifar_lit.data.photos.table import list_table

NAMES = ("cat/0.png", "cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png", "dog/5.png")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Return a folder of NAMES, with the grey value of each image in its name."""
    for name in NAMES:
        save(tmp_path / "pets" / name, int(Path(name).stem))
    return tmp_path / "pets"


def write(table: Path, *rows: str, encoding: str = "utf-8") -> Path:
    table.write_text("\n".join(rows), encoding=encoding)
    return table


PARTS = ("train", "TRAIN", "VAL", "train", "test", "Validation")
ROWS = [(name, name[:3], part) for name, part in zip(NAMES, PARTS, strict=True)]


@pytest.mark.parametrize(
    ("name", "encoding", "head", "row"),
    [
        ("a.csv", "utf-8", "path,label,split", "{path},{label},{split}"),
        ("a.CSV", "utf-8-sig", "Set;Image Path;Class", '{split};"{path}"; {label}'),
        ("a.csv", "utf-8", '"notes",path,label,split', '"a, b\nand ""c""",{path},{label},{split}'),
        ("a.csv", "utf-16", "n\tfile\tcategory\tsplit\r", "1,5\t{path}\t{label}\t{split}\r"),
        ("a.tsv", "utf-8", "file_name\ttarget\tsubset\n\n\t\t", "{path}\t{label}\t{split}"),
        ("a.jsonl", "utf-8-sig", "", '{{"n": [1], "image": "{path}", "class": ["{label}"], "set": "{split}"}}'),
    ],
)
def test_common_table_formats_are_read(pets: Path, name: str, encoding: str, head: str, row: str) -> None:
    rows = [row.format(path=path, label=label, split=split) for path, label, split in ROWS]
    table = write(pets / name, head, *rows, encoding=encoding)
    train, test = (open_set(table, part) for part in (True, False))
    assert train.classes == test.classes == ("cat", "dog")
    assert values(table) == [0, 1, 3, 2, 5] and train.labels.tolist() == [0, 0, 1, 0, 1]
    assert train.val_rows == range(3, 5)
    assert values(table, train=False) == [4] and test.labels.tolist() == [1]


def test_paths_are_relative_to_the_folder_of_the_table_or_absolute(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_rows = [f"{pets / NAMES[0]},cat,train", "../dog/3.png,dog,train"]
    rows = [*train_rows, "../../pets/cat/1.png,cat,test", f"{pets}/dog/4.png,dog,test"]
    (pets / "lists").mkdir()
    table = write(pets / "lists/a.csv", "path,label,split", *rows)
    assert (values(table), values(table, train=False)) == ([0, 3], [1, 4])
    monkeypatch.chdir(pets)
    assert values(Path("lists/a.csv")) == [0, 3]


def test_without_test_rows_val_is_the_test_set_and_validation_images_are_drawn_from_train(pets: Path) -> None:
    rows = [f"{name},{name[:3]},{'held' if name in ('cat/2.png', 'dog/5.png') else 'train'}" for name in NAMES]
    for part in ("val", "test"):
        table = write(pets / f"{part}.csv", "path,label,split", *[row.replace("held", part) for row in rows])
        data = ImageData("folder", str(table), val_size=2)
        assert [rows.tolist() for rows in data.split] == [[1, 3], [0, 2]]
        assert data.test_images.images[:, 0, 0, 0].tolist() == [2, 5]


@pytest.mark.parametrize(
    ("head", "train", "held", "part"),
    [
        ("is_valid", "False", "True", "val"),
        ("Is Test", "no", "YES", "test"),
        ("is_training_image", "1", "0", "test"),
        ("is_train,valid", "1.0,0.0", "0.0,1.0", "val"),
        ("is_train,valid", "true,", ",", "test"),
        ("Usage", "Training", "PublicTest", "val"),
        ("usage", "training", "PrivateTest", "test"),
        ("is_train,valid", "1,0", "0,0", "test"),
    ],
)
def test_a_split_under_names_of_other_programs_is_read(
    pets: Path, head: str, train: str, held: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{name},{name[:3]},{held if name[-5] in '25' else train}" for name in NAMES]
    parts = list_table(write(pets / "a.csv", f"path,label,{head}", *rows), None, False).parts
    assert {part: [len(files) for files in tree.values()] for part, tree in parts.items()} == {
        "train": [2, 2], part: [1, 1]
    }  # fmt: skip
    columns = " and ".join(head.split(","))
    note = f"{columns.replace(' and ', ', ')} is read as the split into training, validation and test images"
    err = capsys.readouterr().err
    assert note in err and "not used" not in err


def test_columns_that_nothing_reads_are_named_in_one_note(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{place},{name},{name[:3]},{place % 5},x,y,no|yes" for place, name in enumerate(NAMES)]
    table = write(pets / "a.csv", ",image,label,fold,id,camera,is_valid", *rows)
    list_table(table, "camera", False, ("id",))
    assert capsys.readouterr().err.startswith(f"{table}: not used: fold, is_valid; --data.groups gives ")
    rows = [f"{name},{name[:3]},{part},{place % 2}" for place, (name, _, part) in enumerate(ROWS)]
    parts = list_table(write(pets / "b.csv", "path,label,split,is_valid", *rows), None, False).parts
    assert [sum(map(len, tree.values())) for tree in parts.values()] == [3, 2, 1]
    assert f"{pets / 'b.csv'}: not used: is_valid; " in capsys.readouterr().err


SEVERAL = ("cat", "cat|dog", "", "dog", "dog|cat", "red cat")


@pytest.mark.parametrize(
    "written", ["{}", "separator ;", "separator ,", "['{}']", "list", "choices", "columns", "own /"]
)
def test_several_labels_are_read_in_each_form(pets: Path, written: str) -> None:
    names = [label.split("|") if label else [] for label in SEVERAL]
    table, settings = pets / "a.csv", {}
    if written in ("list", "choices"):
        values = [own if written == "list" else {"choices": own} for own in names]
        rows = [json.dumps({"path": path, "label": value}) for path, value in zip(NAMES, values, strict=True)]
        table = write(pets / "a.jsonl", *rows)
    elif written == "columns":
        cells = [[str(int(name in own)) for name in ("dog", "cat", "red cat")] for own in names]
        cells[2][0] = ""
        cells[3][1] = "-1.0"
        rows = [",".join([path, *own]) for path, own in zip(NAMES, cells, strict=True)]
        write(table, "path,dog,cat,red cat", *rows)
    else:
        separator = written[-1] if " " in written else ("', '" if "[" in written else "|")
        settings = {"separator": "/"} if "own" in written else {}
        cell = "{}" if " " in written else written
        texts = [cell.format(label.replace("|", separator)) if label else "" for label in SEVERAL]
        write(table, "path,label", *[f'{path},"{text}"' for path, text in zip(NAMES, texts, strict=True)])
    listing = list_table(table, None, False, **settings)
    assert listing.classes == ("cat", "dog", "red cat")
    has = {path: {name for name, value in labels.items() if value == 1} for path, labels in listing.labels.items()}
    assert has == {path: {*own} for path, own in zip(NAMES, names, strict=True)}
    unknown = [(path, name) for path, own in listing.labels.items() for name, value in own.items() if value == -1]
    assert unknown == ([(NAMES[2], "dog"), (NAMES[3], "cat")] if written == "columns" else [])
    rows = listing.label_rows(NAMES[1:4])
    assert rows == [[1, 1, 0], [0, -1 if unknown else 0, 0], [-1 if unknown else 0, 1, 0]]


def test_rows_of_the_same_image_are_joined_if_labels_have_a_separator(
    pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{path},cat," for path in NAMES]
    table = write(pets / "a.csv", "path,label,unknown_labels", *rows, f"{NAMES[0]},\"['dog']\",cat|owl")
    with pytest.raises(UsageError, match=r'row 8: .* keep one row, or join their labels with --data.separator "|"'):
        list_table(table, None, False)
    labels = list_table(table, None, False, separator=";").labels
    assert f"{table}: 7 rows of 6 images, whose labels are joined\n" in capsys.readouterr().err
    assert labels[NAMES[0]] == {"cat": 1.0, "dog": 1.0, "owl": -1.0} and labels[NAMES[1]] == {"cat": 1.0}
    write(table, "path,label,split", *[row + "train" for row in rows], f"{NAMES[0]},dog,test")
    with pytest.raises(UsageError, match="has the split 'test', and 'train' in a row above"):
        list_table(table, None, False, separator=";")


@pytest.mark.parametrize("label", ["oak, red", "dog / cat", "a,b"])
def test_one_label_may_have_a_comma(pets: Path, label: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f'{path},"{label if path[0] == "c" else "dog"}"' for path in NAMES]
    images = open_set(write(pets / "a.csv", "path,label", *rows))
    assert images.classes == tuple(sorted((label, "dog"))) and images.labels.ndim == 1


def test_columns_of_one_class_each_are_classes(pets: Path) -> None:
    rows = [f"{name},{float(name[0] == 'c')},{float(name[0] == 'd')}" for name in NAMES]
    table = write(pets / "a.csv", "image,MEL,NV", *rows)
    images = open_set(table)
    assert images.classes == ("MEL", "NV") and images.labels.tolist() == [0, 0, 1, 1]
    assert open_set(table, separator="|").labels.ndim == 2


def test_images_without_labels_and_rare_labels_are_counted(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_table(write(pets / "a.csv", "path;label", *map(";".join, zip(NAMES, SEVERAL, strict=True))), None, False)
    err = capsys.readouterr().err
    assert "an image has several of 3 labels, or none" in err and "1 image with none of the labels" in err
    assert "too few images for all parts have the labels red cat: add more" in err


def test_images_of_which_no_label_is_known_are_left_out(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["1,0", ",-1", "1,1", "0,1", "1,", "0,0"]
    listing = list_table(
        write(pets / "a.csv", "path,cat,dog", *map(",".join, zip(NAMES, cells, strict=True))), None, False
    )
    assert [*listing.labels] == [name for name in NAMES if name != NAMES[1]]
    assert "1 image left out, of which no label is known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["path,kind,age", "cat/0.png,x,7"], "has no column 'label'"),
        (["path,label", *[f"{name}," for name in NAMES]], r"one class only \(\)"),
        (["path,label", *[f"{name},nan" for name in NAMES]], r"one class only \(\)"),
    ],
)
def test_a_separator_needs_a_column_with_labels(pets: Path, rows: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        list_table(write(pets / "a.csv", *rows), None, False, separator="|")


def test_a_label_of_test_images_only_is_refused(pets: Path) -> None:
    rows = [
        f"{path},{label},{part}" for path, label, part in zip(NAMES, SEVERAL, ["train"] * 5 + ["test"], strict=True)
    ]
    with pytest.raises(UsageError, match="no training images of class red cat"):
        list_table(write(pets / "a.csv", "path,label,split", *rows), None, False)


@pytest.mark.parametrize(
    "classes",
    [
        ("1", "2", "10"), ("-1", "09", "9", "100"), ("10", "2", "2b"), ("Zebra", "zebra", "Ähre", "é", "蜜蜂"),
        ("-1.5", "0.0", "1.0", "2.0", "1e1"),
    ],
)  # fmt: skip
def test_a_table_has_the_class_order_of_its_folder(tmp_path: Path, classes: tuple[str, ...]) -> None:
    paths = [f"{name}/{number}.png" for name in reversed(classes) for number in range(2)]
    for number, path in enumerate(paths):
        save(tmp_path / "set" / path, number)
    table = write(tmp_path / "set" / "labels.csv", "path,label", *(f"{path},{path.split('/')[0]}" for path in paths))
    assert open_set(tmp_path / "set").classes == open_set(table).classes == classes


def test_classes_that_differ_in_case_or_blanks_only_are_noted(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(pets / "a.csv", "path,label", *map("{},{}".format, NAMES, ("A b", "ab", "c", "a B", "d", "C")))
    list_table(table, None, False)
    note = "classes differ in case or blanks only: 'A b' and 'a B' and 'ab', 'C' and 'c'. Rename those that are"
    assert f"{table}: {note}" in capsys.readouterr().err
    for number, name in enumerate(("owl", "Owl ", "cat")):
        save(pets / "folder" / name / "0.png", number), save(pets / "folder" / name / "1.png", number)
    open_set(pets / "folder")
    assert f"{pets / 'folder'}: classes differ in case or blanks only: 'Owl ' and 'owl'. " in capsys.readouterr().err


def test_a_repeated_row_counts_once(pets: Path) -> None:
    rows = [f"{name},{name[:3]},train" for name in (*NAMES[:4], *NAMES[:2])]
    table = write(pets / "a.csv", "path,label,split", *rows, "dog/4.png,dog,test")
    assert values(table) == [0, 1, 2, 3]


def test_missing_files_fail_by_name_or_are_skipped_on_request(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{name},{name[:3]},{'test' if name[-5] in '25' else 'train'}" for name in NAMES]
    gone = [f"gone/{number}.png,cat,train" for number in range(5)]
    table = write(pets / "a.csv", "path,label,split", *rows, *gone)
    text = (
        r"5 of 11 images of .*a.csv do not exist: gone/0.png, gone/1.png, gone/2.png and 2 more; .*--data.skip_bad true"
    )
    with pytest.raises(UsageError, match=text):
        open_set(table)
    assert values(table, skip_bad=True) == [0, 1, 3, 4]
    err = capsys.readouterr().err
    assert (
        f"5 of 11 images of {table} cannot be read: gone/0.png, gone/1.png, gone/2.png and 2 more (missing: there"
        in err
    )
    damage(pets / "cat/1.png")
    write(table, "path,label,split", *rows)
    with pytest.raises(Failure, match=f"1 of 6 images of {table} cannot be read: cat/1.png"):
        open_set(table)


HEAD = "path,label,split,group"
CAT, DOG = "cat/0.png,cat", "dog/3.png,dog"


@pytest.mark.parametrize(
    ("name", "rows", "text"),
    [
        ("a.csv", ["file,kind,age", CAT + ",1"], "no column 'label', only file, kind, age: .* label, labels,"),
        ("a.csv", [HEAD], "has no rows below the names of its columns"),
        ("a.csv", [HEAD, CAT, "cat/1.png,cat"], r"one class only \(cat\)"),
        ("a.csv", [HEAD, f"{CAT},train", "dog/3.png"], "row 3 has no label"),
        ("a.csv", [HEAD, CAT, "dog/3.png,NaN"], "row 3 has no label"),
        ("a.csv", ["path,label,is_valid", f"{CAT},0", f"{DOG},0"], "has 'train' in column is_valid: each row needs"),
        ("a.csv", ["path,label, label", f"{CAT},dog"], r"the same name \(path,label, label\): rename one"),
        ("a.csv", ["path,label,is_valid,test", f"{CAT},1,1"], "row 2 is in val, test by its columns is_valid, test"),
        ("a.csv", [HEAD, f"{CAT},tset", f"{DOG},tset"], "has 'tset' in column split: each row needs train, val"),
        ("a.csv", [HEAD, f"{CAT},train", "cat/0.png,dog,train"], "row 3: cat/0.png has the label 'dog', and 'cat' in"),
        ("a.csv", [HEAD, f"{CAT},train,p1", "cat/1.png,cat,test,p1"], "row 3: group 'p1' is in train and in test"),
        ("a.csv", [HEAD, f"{CAT},train", f"{DOG},test"], "no training images of class dog"),
        ("a.csv", [HEAD, f"{CAT},test", f"{DOG},test"], "has 'test' in column split: each row needs"),
        ("a.csv", [HEAD, f"{CAT},,1", "cat/1.png,cat,,1", f"{DOG},,1", "dog/4.png,dog,,1"], "only one image or group"),
        ("a.csv", [HEAD, "cat/0.png,c\tt", DOG], r"in .*a.csv, the class 'c\\tt' has to be renamed"),
    ],
)  # fmt: skip
def test_an_invalid_table_is_refused_in_one_line(pets: Path, name: str, rows: list[str], text: str) -> None:
    table = write(pets / name, *rows)
    with pytest.raises(UsageError, match=text) as refusal:
        open_set(table)
    assert str(table) in str(refusal.value) and "\n" not in str(refusal.value) and not (pets.parent / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"", "has no rows"),
        ("a.csv", "path,label\nä.png,cat".encode("cp1252"), "neither UTF-8 nor UTF-16 text: save it as CSV UTF-8"),
        ("a.csv", b"url,label\nhttps://a.org/9.png,b", "1 of 1 images of .*9.png; .* Download them first"),
        ("a.csv.gz", b"", r"a.csv.gz is not a table \(.csv, .*\): save a table as CSV"),
        ("a.xlsx", b"", r"a.xlsx is not a table"),
        ("a.jsonl", b'{"path": "a", "label": {"b": 1}}', "row 1 has no label"),
        ("a.jsonl", b'{"path": "a", "label": "b"}\n{"path": ', "row 2 of the table is no JSON object"),
    ],
)  # fmt: skip
def test_an_unreadable_table_is_refused_in_one_line(pets: Path, name: str, content: bytes, text: str) -> None:
    (pets / name).write_bytes(content)
    with pytest.raises(UsageError, match=text) as refusal:
        open_set(pets / name)
    assert "\n" not in str(refusal.value)


# ---- columns and paths that other programs write


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [
        ("a.csv", "id,breed", "{stem},{label}"),
        ("a.csv", "id,img,labels", "x{stem},{path},{label}"),
        ("a.csv", "", "{path},{label}"),
        ("a.txt", "", "{path} {label}"),
        ("a.txt", "", "{label}/{stem} {label}"),
        ("train_list.TXT", "", "{path}\t{label}"),
        ("a.csv", "Unnamed: 0,path,\u54c1\u79cd", "7,{path},{label}"),
        ("a.csv", "path|label", ".\\{label}\\{stem}.png|{label}"),
        ("a.csv", "path,label", "C:\\Users\\me\\pets\\{label}\\{stem}.PNG,{label}"),
        ("a.csv", "path,label", "\\\\server\\pets\\{label}\\{stem}.png,{label}"),
        ("a.csv", "sep=;\npath;label", "https://a.org/p%65ts/{path};{label}"),
        ("a.csv", "image,choice", "/data/upload/{stem}/{stem}.png,{label}"),
        ("a.csv", "image,choice", "/data/local-files/?d=pets%2F{path},{label}"),
        ("a.csv", "path,label", "{label}/{stem}.{mixed},{label}"),
        ("a.csv", "id_code,diagnosis", "{label}/{stem}.jpeg,{label}"),
        ("a.csv", "image,choice", "/data/upload/3/1a2b3c4d-{stem}.png,{label}"),
        ("a.csv", '\n\n"sep=;"\n\npath;label;text', "{path};{label};" + 200_000 * "x"),
        ("a.jsonl", "", '{{"path": "{path}", "label": "{label}", "text": "\u2028"}}'),
    ],
)
def test_usual_columns_paths_and_lists_are_understood(pets: Path, name: str, head: str, row: str) -> None:
    rows = [head] if head else []
    for path in NAMES:
        mixed = {"cat": "PNG", "dog": "png"}[path[:3]]
        rows.append(row.format(path=path, label=path[:3], stem=Path(path).stem, mixed=mixed))
    train, test = (open_set(write(pets / name, *rows), part) for part in (True, False))
    assert train.classes == ("cat", "dog")
    assert sorted(zip([*train.names, *test.names], [*train.labels.tolist(), *test.labels.tolist()], strict=True)) == [
        (name, int(name[:3] == "dog")) for name in NAMES
    ]


def test_single_carriage_returns_and_an_array_of_objects_are_read(pets: Path) -> None:
    rows = [{"path": path, "label": path[:3]} for path in NAMES]
    (pets / "a.csv").write_bytes("\r".join(["path,label", *(",".join(row.values()) for row in rows)]).encode())
    (pets / "a.jsonl").write_text(json.dumps(rows, indent=1))
    for name in ("a.csv", "a.jsonl"):
        tree = list_table(pets / name, None, False).parts["all"]
        assert [file.path for files in tree.values() for file in files] == [*NAMES]


def test_whole_numbers_with_and_without_decimals_are_one_class(pets: Path) -> None:
    table = write(pets / "a.csv", "path,label", *map("{},{}".format, NAMES, ("0", "0.0", "1", "1.0", "2.0", "2.0")))
    assert [*list_table(table, None, False).parts["all"]] == ["0", "1", "2.0"]


def test_a_list_may_have_blanks_in_paths_and_labels(pets: Path) -> None:
    save(pets / "my cat/0 1.png", 7)
    rows = ["my cat/0 1.png red cat", "", "  dog/3.png   hound", "dog/4.PNG hound"]
    listing = list_table(write(pets / "list.txt", *rows, encoding="utf-16"), None, False)
    assert {name: [file.path for file in files] for name, files in listing.parts["all"].items()} == {
        "hound": ["dog/3.png", "dog/4.png"], "red cat": ["my cat/0 1.png"],
    }  # fmt: skip


def test_names_that_fit_several_files_are_those_of_training_images_or_refused(pets: Path) -> None:
    for folder in ("train", "test"):
        save(pets / folder / "0.jpg"), save(pets / folder / "1.jpg")
    table = write(pets / "train.csv", "id,label", "0,a", "1,b")
    listing = list_table(table, None, False)
    assert [file.path for files in listing.parts["all"].values() for file in files] == ["train/0.jpg", "train/1.jpg"]
    save(pets / "train/0.tif")
    with pytest.raises(UsageError, match=r"0 may be train/0\.\w+ or train/0\.\w+: write paths relative to"):
        list_table(table, None, False)


def test_a_missing_image_is_not_replaced_by_one_of_another_folder(pets: Path) -> None:
    rows = [f"/old/{name},{name[:3]}" for name in (*NAMES, "cat/4.png")]
    with pytest.raises(UsageError, match=r"1 of 7 images .* do not exist: /old/cat/4\.png; "):
        list_table(write(pets / "a.csv", "path,label", *rows), None, False)


def test_images_of_a_wrong_folder_are_found_by_class_folder_and_name(pets: Path) -> None:
    rows = [f"{'old/' * (name in NAMES[:2])}{name},{name[:3]}" for name in NAMES]
    tree = list_table(write(pets / "a.csv", "path,label", *rows), None, False).parts["all"]
    assert [file.path for files in tree.values() for file in files] == [*NAMES]


def test_a_table_of_missing_files_only_is_refused_with_the_reason(pets: Path) -> None:
    table = write(pets / "a.csv", "path,label", "x0.png,cat", "x3.png,dog")
    text = "2 of 2 images .* paths are relative to .*pets/. No image below it has such a name"
    with pytest.raises(UsageError, match=text) as refusal:
        open_set(table, skip_bad=True)
    assert "skip_bad" not in str(refusal.value)


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_accents_may_have_another_form_than_the_files(pets: Path, forms: tuple[str, str]) -> None:
    on_disk, in_table = (partial(unicodedata.normalize, form) for form in forms)
    names = ["Käse/é.png", "Käse/0.png", "Brot/ü.png", "Brot/1.png"]
    for number, name in enumerate(names):
        save(pets / on_disk(name), 50 + number)
    rows = [in_table(f"{name},{name.split('/')[0]},train") for name in names] + [f"{NAMES[0]},{on_disk('Käse')},test"]
    train = open_set(write(pets / "a.csv", "path,label,split", *rows, f"{NAMES[1]},Brot,test"))
    assert train.classes == ("Brot", "K\xe4se") and train.images[:, 0, 0, 0].tolist() == [53, 52, 51, 50]


# ---- groups


def test_the_column_of_groups_is_named_by_the_setting_or_called_group(pets: Path) -> None:
    table = write(pets / "a.csv", "path,label,Patient,Group", *[f"{name},{name[:3]},{name[-5]},1" for name in NAMES])
    assert list_table(table, "Patient", False).groups == {name: name[-5] for name in NAMES}
    assert list_table(table, None, False).groups == dict.fromkeys(NAMES, "1")


# ---- columns for `data.groups`


def test_columns_named_by_data_groups_follow_their_images(pets: Path) -> None:
    cameras = ("east", "we\u0301st", "", "east", " north ", "east")
    rows = [f"{name},{name[:3]},{part},{camera}" for (name, _, part), camera in zip(ROWS, cameras, strict=True)]
    rows[5] = rows[5].rpartition(",")[0]  # a row without the last cell
    table = write(pets / "a.csv", "path,label,split,Camera", *rows)
    train, test = (open_set(table, part, groups=("Camera", "label")) for part in (True, False))
    assert train.images[:, 0, 0, 0].tolist() == [0, 1, 3, 2, 5]
    assert train.columns == {
        "Camera": ["east", "w\u00e9st", "east", "", ""],
        "label": ["cat", "cat", "dog", "cat", "dog"],
    }
    assert test.columns == {"Camera": ["north"], "label": ["dog"]}
    assert open_set(table).columns == {}
    with pytest.raises(UsageError, match=r"no column 'camera', only path, .* Did you mean Camera\?"):
        open_set(table, groups=("camera",))
