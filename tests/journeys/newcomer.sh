# A newcomer with a book: train for a minute, read, fill gaps, score, look, continue, and move the run.
sedd --help
sedd plan book.txt --minutes 1
sedd train book.txt --out book --minutes 1
sedd info book
sedd runs
sedd sample book -n 3
sedd infill book "The model {30} noise." -n 2
sedd score book "the noise of the model" "eht esion fo eht ledom"
sedd trace book --out trace.png
sedd report book --out report.html
sedd train book.txt --out book --minutes 1.2 --resume
mkdir -p elsewhere
mv book elsewhere/moved
cd elsewhere
sedd eval moved --draws 2
sedd info moved --json
! sedd train ../book.txt --out moved
! sedd sample nowhere
! sedd train ../missing.txt --out new
