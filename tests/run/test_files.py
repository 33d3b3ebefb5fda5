from firm.run.files import write_csv


def test_texts_in_tables_hold_nothing_that_a_terminal_or_an_editor_obeys(tmp_path):
    rows = [{"prompt": "one\x1b[2J\ntwo", "reply": "a\u202eb\tc 你好", "score": -0.5}]
    write_csv(tmp_path / "samples.csv", rows)
    text = (tmp_path / "samples.csv").read_text()
    assert text == 'prompt,reply,score\n"one\\x1b[2J\ntwo",a\\u202eb\tc 你好,-0.5\n'
