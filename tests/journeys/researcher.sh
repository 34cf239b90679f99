# A researcher who compares objectives on the same data, and wants numbers with errors, plots and JSON.
size="--tokenizer chars --set model.width=64 --set model.depth=2 --set model.heads=2 --seq-len 64 --batch-size 32 --lr 3e-3"
for objective in score-entropy lambda-dce mean d3pm ratio-matching autoregressive; do
  sedd train book.txt $size --objective $objective --steps 150 --out runs/$objective || exit 1
done
sedd train book.txt $size --process uniform --steps 150 --out runs/uniform
! sedd train book.txt --objective implicit-score-entropy --out runs/implicit
! sedd train book.txt --objective scor-entropy --out runs/misspelt
sedd runs runs
sedd compare runs/* --draws 2 --plot compare.png
sedd eval runs/lambda-dce book.txt --draws 2 --json | python -m json.tool > eval.json
sedd sample runs/score-entropy --sampler euler --steps 16 -n 2 --json
sedd quality runs/score-entropy runs/lambda-dce --judge runs/autoregressive -n 16 --sweep steps=4,16 --out sweep.png --out sweep.jsonl
! sedd export runs/lambda-dce --format radd --out exported
sedd cache
