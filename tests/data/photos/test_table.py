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
from cifar_lit.data.settings import Split

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
BY_KEY = [{"split": part, "path": path, "label": label} for path, label, part in ROWS]


@pytest.mark.parametrize(
    ("name", "encoding", "rows"),
    [
        ("a.csv", "utf-8", ["path,label,split", *map(",".join, ROWS)]),
        ("a.CSV", "utf-8-sig", ["Set;Image Path;Class", *[f'{part};"{path}"; {label}' for path, label, part in ROWS]]),
        ("a.csv", "utf-8", ['"notes",path,label,split', *[f'"a, b\nand ""c""",{",".join(row)}' for row in ROWS]]),
        ("a.csv", "utf-8", ["n\tfile\tcategory\tsplit\r", *["\t".join(("1,5", *row)) + "\r" for row in ROWS]]),
        ("a.tsv", "utf-8", ["file_name\ttarget\tsubset", "", *map("\t".join, ROWS), "\t\t"]),
        ("a.jsonl", "utf-8-sig", [json.dumps({"n": [1], "image": a, "class": b, "set": c}) for a, b, c in ROWS]),
        ("a.jsonl", "utf-8", [json.dumps(keys, sort_keys=bool(place % 2)) for place, keys in enumerate(BY_KEY)]),
    ],
)
def test_common_table_formats_are_read(pets: Path, name: str, encoding: str, rows: list[str]) -> None:
    table = write(pets / name, *rows, encoding=encoding)
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
    "classes",
    [
        ("1", "2", "10"), ("-1", "09", "9", "100"), ("10", "2", "2b"), ("Zebra", "zebra", "Ähre", "é", "蜜蜂"),
        ("-1.5", "0.0", "1.0", "2.0", "10.0"),
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
    assert f"5 of 9 train images of {table} are left out: gone/0.png (missing: there is no such file" in err
    damage(pets / "cat/1.png")
    write(table, "path,label,split", *rows)
    with pytest.raises(Failure, match=f"1 of 6 images of {table} cannot be read: cat/1.png"):
        open_set(table)


HEAD = "path,label,split,group"
CAT, DOG = "cat/0.png,cat", "dog/3.png,dog"


@pytest.mark.parametrize(
    ("name", "rows", "text"),
    [
        ("a.csv", ["file,kind,age", CAT + ",1"], r"no column for the label \(label, labels, .*, only file, kind, age"),
        ("a.csv", [HEAD], "has no rows below its column names, path, label, split, group"),
        ("a.csv", [HEAD, CAT, "cat/1.png,cat"], r"one class only \(cat\)"),
        ("a.csv", [HEAD, f"{CAT},train", "dog/3.png"], "row 3 has no label"),
        ("a.csv", [HEAD, f"{CAT},tset"], "row 2: split 'tset' is none of train, .* Did you mean test?"),
        ("a.csv", [HEAD, f"{CAT},train", f"{DOG},"], "row 3: some rows have a split, others none"),
        ("a.csv", [HEAD, f"{CAT},train", "cat/0.png,dog,train"], "row 3: cat/0.png has the label 'dog', and 'cat' in"),
        ("a.csv", [HEAD, f"{CAT},train,p1", "cat/1.png,cat,test,p1"], "row 3: group 'p1' is in train and in test"),
        ("a.csv", [HEAD, f"{CAT},train", f"{DOG},test"], "no training images of class dog"),
        ("a.csv", [HEAD, f"{CAT},test", f"{DOG},test"], "has no train rows"),
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
        ("a.csv", b"", "has no column for the path"),
        ("a.csv", "path,label\nä.png,cat".encode("utf-16"), "not a UTF-8 text"),
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
    ("name", "rows"),
    [
        ("a.csv", ["id,breed", *[f"{Path(name).stem},{name[:3]}" for name in NAMES]]),
        ("a.csv", ["image_id,choice", *[f"{Path(name).name},{name[:3]}" for name in NAMES]]),
        ("a.csv", ["id,img,labels", *[f"{9 - place},{name},{name[:3]}" for place, name in enumerate(NAMES)]]),
        ("a.csv", ["path,label", *[rf".\{name[:3]}\{name[4:]},{name[:3]}" for name in NAMES]]),
        ("a.csv", [f"{name},{name[:3]}" for name in NAMES]),
        ("a.txt", [f"{name} {name[:3]}" for name in NAMES]),
        ("train_list.TXT", [f"{name}\t{name[:3]}" for name in NAMES]),
    ],
)
def test_usual_columns_paths_and_lists_are_understood(pets: Path, name: str, rows: list[str]) -> None:
    train, test = (open_set(write(pets / name, *rows), part) for part in (True, False))
    assert train.classes == ("cat", "dog")
    assert sorted(zip([*train.names, *test.names], [*train.labels.tolist(), *test.labels.tolist()], strict=True)) == [
        (name, int(name[:3] == "dog")) for name in NAMES
    ]


def test_a_list_may_have_blanks_in_paths(pets: Path) -> None:
    save(pets / "my cat/0 1.png", 7)
    rows = ["my cat/0 1.png 0", "", "  dog/3.png   1", "cat/0.png 0", "dog/4.png 1"]
    listing = list_table(write(pets / "list.txt", *rows), None, False)
    assert {name: [file.path for file in files] for name, files in listing.parts["all"].items()} == {
        "0": ["cat/0.png", "my cat/0 1.png"], "1": ["dog/3.png", "dog/4.png"],
    }  # fmt: skip


def test_names_that_fit_several_files_are_refused_with_both(pets: Path) -> None:
    for folder in ("train", "test"):
        save(pets / folder / "0.jpg"), save(pets / folder / "1.jpg")
    table = write(pets / "train.csv", "id,label", "0.jpg,a", "1.jpg,b")
    with pytest.raises(UsageError, match=r"0\.jpg may be \S*0\.jpg or \S*0\.jpg: write paths relative to"):
        list_table(table, None, False)


def test_a_table_of_missing_files_only_is_refused_with_the_reason(pets: Path) -> None:
    table = write(pets / "a.csv", "path,label", "x0.png,cat", "x3.png,dog")
    text = "2 of 2 images .* paths are relative to .*pets/. No image below it has such a name"
    with pytest.raises(UsageError, match=text) as refusal:
        open_set(table, skip_bad=True)
    assert "skip_bad" not in str(refusal.value)


def test_one_file_in_two_spellings_is_one_image(pets: Path) -> None:
    rows = ["cat/0.png,cat,train", "dog/3.png,dog,train", f"{pets / 'cat/0.png'},cat,test"]
    with pytest.raises(UsageError, match=r"row 4: cat/0\.png has the split 'test', and 'train' in a row above"):
        list_table(write(pets / "a.csv", "path,label,split", *rows), None, False)


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


def test_a_group_is_in_only_one_of_train_validation_and_test(pets: Path) -> None:
    rows = []
    for patient in range(12):
        for number in range(4):
            path = save(pets / f"more/{patient}-{number}.png", 10 * patient + number).relative_to(pets)
            rows.append(f"{path},{'ab'[patient % 2]},{patient}")
    table = write(pets / "a.csv", "path,label,Patient", *rows)
    data = ImageData("folder", str(table), val_size=0.25, split=Split(group="Patient"))
    train, val = (data.train_images.images[part, 0, 0, 0].tolist() for part in data.split)
    test = data.test_images.images[:, 0, 0, 0].tolist()
    patients = [{value // 10 for value in part} for part in (train, val, test)]
    assert sum(map(len, patients)) == 12 and set.union(*patients) == set(range(12))
    assert [len(part) for part in (train, val, test)] == [32, 8, 8]  # one patient of each class
    for part in patients[1:]:
        assert sorted(patient % 2 for patient in part) == [0, 1]


# ---- columns for `data.groups`


def test_columns_named_by_data_groups_follow_their_images(pets: Path) -> None:
    cameras = ("east", "we\u0301st", "", "east", " north ", "east")
    rows = [f"{name},{name[:3]},{part},{camera}" for (name, _, part), camera in zip(ROWS, cameras, strict=True)]
    rows[5] = rows[5].rpartition(",")[0]  # a row without the last cell
    objects = [{**row, "Camera": camera or None} for row, camera in zip(BY_KEY, cameras, strict=True)]
    del objects[5]["Camera"]
    tables = (
        write(pets / "a.csv", "path,label,split,Camera", *rows),
        write(pets / "a.jsonl", *map(json.dumps, objects)),
    )
    for table in tables:
        train, test = (open_set(table, part, groups=("Camera", "label")) for part in (True, False))
        assert train.images[:, 0, 0, 0].tolist() == [0, 1, 3, 2, 5]
        assert train.columns == {
            "Camera": ["east", "w\u00e9st", "east", "", ""],
            "label": ["cat", "cat", "dog", "cat", "dog"],
        }
        assert test.columns == {"Camera": ["north"], "label": ["dog"]}
        assert open_set(table).columns == {}
    with pytest.raises(UsageError, match=r"no column 'camera' for data\.groups, only path, .* Did you mean Camera\?"):
        open_set(tables[0], groups=("camera",))
